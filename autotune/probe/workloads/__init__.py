"""Workloads that a probe measures: its grid, those that a program recorded, those of a model."""
