"""Training loops of other libraries on our engine."""
