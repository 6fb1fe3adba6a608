"""Arrays of other libraries, in and out without a copy."""
