"""Watching a run: metrics, traces, reports."""
