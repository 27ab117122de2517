"""Our own kernels, in Triton: host side, device side, and the tiles that they may use."""
