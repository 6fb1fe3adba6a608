"""Data sets of the scripts."""
