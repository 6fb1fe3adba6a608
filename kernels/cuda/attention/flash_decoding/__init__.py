"""Flash-Decoding on tensor cores: few query rows against a long cache of keys and values."""
