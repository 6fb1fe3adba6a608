"""Runs rungs in the simulator, counts their traffic and compares it with the formulas."""
