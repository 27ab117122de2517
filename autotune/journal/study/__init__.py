"""The study of one cell: its trials with their parameters, and the end of the search."""
