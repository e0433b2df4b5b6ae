"""The model of a run: its configuration, weights, adapters, a small copy, and its folder."""
