"""Processes: start the ranks of this machine, let them meet, watch them, end them."""
