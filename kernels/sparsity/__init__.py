"""Block-sparse masks: states of blocks, builders, lists of visited tiles, pictures."""
