"""Run rungs in the simulator, count their memory traffic and compare it with the formulas."""
