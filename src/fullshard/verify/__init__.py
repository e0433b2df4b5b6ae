"""`fullshard verify`: the same steps on sharded ranks and in one process, compared."""
