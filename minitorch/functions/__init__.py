"""Differentiable functions: value and gradient side by side, one concept a file."""
