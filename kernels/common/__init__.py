"""Functions with one source for every compiler, and checks of arguments, without numba or devices."""
