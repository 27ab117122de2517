"""Attends with queries of other positions than the keys: cross attention, a cache of keys and values, decoding."""
