"""Checkpoints of XLA arrays."""
