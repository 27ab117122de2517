"""Several ranks measured as one: a relay on each, one coordinator."""
