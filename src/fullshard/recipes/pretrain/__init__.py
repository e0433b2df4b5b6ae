"""Pre-training on text."""
