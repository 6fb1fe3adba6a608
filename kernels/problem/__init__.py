"""The question of one call: every argument checked, with the error texts, and the record of its arrays."""
