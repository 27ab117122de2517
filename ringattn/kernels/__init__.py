"""Block kernels by family, behind one contract and one registry."""
