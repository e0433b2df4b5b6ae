"""Forecasts of a run: memory, time, and advice. Pure, like the planner."""
