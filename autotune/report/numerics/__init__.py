"""Maps where kernels are right, by head dimension: what is tried, the workers that try it, the map."""
