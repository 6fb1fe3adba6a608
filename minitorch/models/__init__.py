"""Transformer layers, key/value cache, decoding, pre-trained weights."""
