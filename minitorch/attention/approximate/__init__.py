"""Approximations of attention, one method a file, on tensors (…, heads, seq, head_dim)."""
