"""The derivatives of flash2's passes along the tangents of q, k and v."""
