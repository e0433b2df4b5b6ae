"""Measurements of this engine beside the peers that are installed."""
