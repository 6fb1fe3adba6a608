"""NumPy reference implementations: the textbook, the tile loop, the softmax ladder."""
