"""Programs to be run under compute-sanitizer."""
