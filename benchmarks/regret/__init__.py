"""Cells to tune in simulated time, methods that tune them, and tables of how far from the best they end."""
