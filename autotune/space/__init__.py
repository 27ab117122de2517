"""The plans that exist for a cell."""
