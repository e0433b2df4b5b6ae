"""Watching a run: metrics, trackers, reports, hangs."""
