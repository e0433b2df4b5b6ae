"""Runs a plan on XLA, through jax.

    planner/arrays.py ---> plan (mesh, shardings) ---> step: shard_map, gathers, reductions, update

The plan lists every collective: inside `shard_map` the compiler adds none.
"""

from __future__ import annotations

from importlib.util import find_spec

from fullshard.errors import ConfigError

for _package in ("jax", "optax"):
    if find_spec(_package) is None:
        raise ConfigError(
            f"backend: jax needs {_package}, which is not installed. "
            "Run pip install 'fullshard[jax]'."
        )
