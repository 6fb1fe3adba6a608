"""Matrix products on the CPU: BLAS on numba's threads, tiles in vector registers."""
