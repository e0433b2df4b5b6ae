"""Measurements of this engine and of installed peers."""
