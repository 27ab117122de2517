"""The cells of a probe: which there are, their search one by one, their rows."""
