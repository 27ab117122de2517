"""Holds worker processes beside the one that measures: they compile ahead and share validations."""
