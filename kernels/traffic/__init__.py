"""FLOP and byte formulas and tile budgets: arithmetic on sizes, no kernels."""
