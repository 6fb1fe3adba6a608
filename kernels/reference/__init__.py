"""NumPy to read and to compare with: textbook, tile loop, softmax ladder, evolution."""
