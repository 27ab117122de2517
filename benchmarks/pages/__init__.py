"""The tables of README.md and docs/ that hold measured figures, made from benchmarks/results."""
