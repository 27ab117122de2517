"""Checks against float64 whether a kernel is right on this machine, and keeps the results."""
