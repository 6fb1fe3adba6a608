"""What becomes of one score: which (row, col) is visible, and the user's functions of a score."""
