"""Run rungs on the emulated GPU, count their memory traffic and compare it with the formulas."""
