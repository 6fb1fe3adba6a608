"""Formulas for floating-point operations, bytes and tile budgets, without kernels."""
