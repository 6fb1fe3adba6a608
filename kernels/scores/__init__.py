"""The options of attention that act on a score, the visibility of (row, col), and user functions."""
