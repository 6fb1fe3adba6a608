"""Element types, storage checks, and the loops behind the three backends."""
