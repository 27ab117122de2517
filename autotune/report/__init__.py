"""What a profile or a machine says to people: summary, page, explanation, diagnosis."""
