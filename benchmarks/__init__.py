"""Measurements of this repository: `python -m benchmarks.NAME --help`, from its root."""
