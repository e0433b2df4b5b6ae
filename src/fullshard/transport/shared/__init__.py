"""Ranks of one host that map one copy of the weights, and read each other's gradients."""
