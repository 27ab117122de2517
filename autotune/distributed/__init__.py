"""Measures several ranks as one: a relay on each, one coordinator."""
