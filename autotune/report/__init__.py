"""Reports on a profile or a machine: summary, page, explanation, diagnosis."""
