"""Transformer layers, key/value cache, decoding."""
