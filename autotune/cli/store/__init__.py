"""Commands about stores, which share profiles between machines."""
