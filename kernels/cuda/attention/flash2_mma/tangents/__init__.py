"""The derivatives of flash2_mma's passes along the tangents of q, k and v."""
