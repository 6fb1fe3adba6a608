"""Differentiable functions, each with its value and gradient; one concept per file."""
