"""Functions with one source for every compiler, and checks of single arguments; no numba, no devices."""
