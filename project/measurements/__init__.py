"""Benchmarks and experiments, a module each; ``python project/measure.py`` lists and runs them."""
