"""Fully sharded training in JAX: functions on pytrees.

import fullshard.jax as fj

mesh = fj.make_mesh(shard=8)
plan = fj.plan(jax.eval_shape(init_fn, key), {"strategy": "full_shard"}, mesh, blocks=["layers"])
state = fj.init(plan, init_fn, tx, key)
step = fj.train_step(plan, loss_fn, tx)
state, metrics = step(state, batch)
"""

from __future__ import annotations

from fullshard.jax.state import load, load_values, memory, pad_batch, save, shard, split
from fullshard.jax.tutorial import (
    analyze_memory,
    create_fsdp_train_step,
    fsdp_with_checkpointing,
    print_sharding,
    selective_fsdp,
    shard_fsdp,
    sharding_table,
)
from fullshard.xla.gather import gather, scan_blocks
from fullshard.xla.plan import make_mesh, plan
from fullshard.xla.step import eval_step, full_params, init, train_step
from fullshard.xla.traced import census

__all__ = [
    "analyze_memory",
    "census",
    "create_fsdp_train_step",
    "eval_step",
    "fsdp_with_checkpointing",
    "full_params",
    "gather",
    "init",
    "load",
    "load_values",
    "make_mesh",
    "memory",
    "pad_batch",
    "plan",
    "print_sharding",
    "save",
    "scan_blocks",
    "selective_fsdp",
    "shard",
    "shard_fsdp",
    "sharding_table",
    "split",
    "train_step",
]
