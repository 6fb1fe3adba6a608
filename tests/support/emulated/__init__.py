"""A GPU emulated in Python, for kernels of tensor-core instructions."""
