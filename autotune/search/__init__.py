"""The search of one cell: candidates raced against the default, improved, re-timed."""
