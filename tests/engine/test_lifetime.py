"""A sharded model that is deleted leaves nothing behind: memory, hooks, groups, threads."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fullshard as fs
from fullshard.engine.engine import engine_of


def _trained(transport: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    fs.shard(model, transport=transport)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(2, 16)).sum().backward()
    fs.clip_grad_norm_(model, 1.0)
    optimizer.step()
    return model


def delete_models(transport: str) -> tuple[list[bool], list[int]]:
    """Which engines are alive after their models went, and how many threads there are then."""
    alive, threads = [], []
    for _ in range(3):
        model = _trained(transport)
        engine = weakref.ref(engine_of(model))
        del model
        gc.collect()
        alive.append(engine() is not None)
        threads.append(len(list(Path("/proc/self/task").iterdir())))
    return alive, threads


def test_deleted_model_is_freed_with_its_groups_and_threads(ranks: Any) -> None:
    for transport in ("direct", "c10d"):
        for alive, threads in ranks(2)(delete_models, transport):
            assert alive == [False, False, False]
            assert threads[1] == threads[2], threads


def test_deleted_model_is_freed_without_a_process_group() -> None:
    engine = weakref.ref(engine_of(_trained("auto")))
    gc.collect()
    assert engine() is None
