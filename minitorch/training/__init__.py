"""Optimisers, checkpoints, recomputation, captured steps, anomaly detection."""
