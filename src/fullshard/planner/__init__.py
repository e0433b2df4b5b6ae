"""Plans of runs: pure, rank-free arithmetic. No torch, no jax, no numpy, no I/O."""
