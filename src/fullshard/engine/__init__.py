"""Runs a plan on PyTorch."""
