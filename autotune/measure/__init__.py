"""Measures plans: workers, timing, interference, and the simulated machine."""
