"""The record of a probe: an Optuna journal file, its lock, its studies."""
