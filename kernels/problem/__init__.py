"""Checks of the arguments of an attention call, with their error messages, and the record of its arrays."""
