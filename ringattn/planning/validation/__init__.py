"""Whether a kernel is right on this machine: checks against float64, and their results kept."""
