"""Runs a resolved plan on one device: gather, kernels, merge, workspace."""
