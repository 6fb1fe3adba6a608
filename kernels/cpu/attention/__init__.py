"""Attention on the CPU: flash2 forward and backward, mask gradient, flash decoding."""
