"""Words and tables of plans that pages and terminal share."""
