"""Fully sharded training in JAX: functions on pytrees.

import fullshard.jax as fj

mesh = fj.make_mesh(shard=8)
plan = fj.plan(jax.eval_shape(init_fn, key), {"strategy": "full_shard"}, mesh, blocks=["layers"])
state = fj.init(plan, init_fn, tx, key)
step = fj.train_step(plan, loss_fn, tx)
state, metrics = step(state, batch)
"""

from __future__ import annotations

from fullshard.jax.state import load as load
from fullshard.jax.state import load_values as load_values
from fullshard.jax.state import memory as memory
from fullshard.jax.state import pad_batch as pad_batch
from fullshard.jax.state import save as save
from fullshard.jax.state import shard as shard
from fullshard.jax.state import split as split
from fullshard.jax.tutorial import analyze_memory as analyze_memory
from fullshard.jax.tutorial import create_fsdp_train_step as create_fsdp_train_step
from fullshard.jax.tutorial import fsdp_with_checkpointing as fsdp_with_checkpointing
from fullshard.jax.tutorial import print_sharding as print_sharding
from fullshard.jax.tutorial import selective_fsdp as selective_fsdp
from fullshard.jax.tutorial import shard_fsdp as shard_fsdp
from fullshard.jax.tutorial import sharding_table as sharding_table
from fullshard.xla.census import census as census
from fullshard.xla.gather import gather as gather
from fullshard.xla.gather import scan_blocks as scan_blocks
from fullshard.xla.plan import make_mesh as make_mesh
from fullshard.xla.plan import plan as plan
from fullshard.xla.step import eval_step as eval_step
from fullshard.xla.step import full_params as full_params
from fullshard.xla.step import init as init
from fullshard.xla.step import train_step as train_step

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
