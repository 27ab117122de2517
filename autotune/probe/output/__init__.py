"""The profile a probe writes, and what stands at its path already."""
