"""One training loop and the small recipes that feed it."""
