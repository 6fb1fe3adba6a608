"""Attention composed of tensor operations."""
