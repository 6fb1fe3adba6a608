"""Pictures of what a computation is made of."""
