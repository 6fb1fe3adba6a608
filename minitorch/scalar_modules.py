"""An empty module; the published course has one of this name."""
