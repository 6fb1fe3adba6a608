"""Calls that may be nonsense, and memory that nobody may touch."""
