"""How to measure, what is compared with what, records and tables."""
