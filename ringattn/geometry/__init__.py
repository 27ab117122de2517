"""Positions as plain numbers: patterns, layouts, the rows of a call, ring schedules."""
