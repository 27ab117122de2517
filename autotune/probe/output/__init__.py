"""The profile a probe writes, and the one that is there already."""
