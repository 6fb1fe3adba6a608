"""Device functions and small kernels that every room of ``cuda`` calls."""
