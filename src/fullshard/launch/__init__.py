"""Processes: start the ranks of this machine, connect them, watch them, end them."""
