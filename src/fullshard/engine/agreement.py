"""Exchange of values and errors between the ranks of an engine, outside of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fullshard.errors import EngineError, raise_together
from fullshard.transport.groups import own_group, tell_everyone

if TYPE_CHECKING:
    from fullshard.engine.engine import Engine

T = TypeVar("T")


def tell(engine: Engine, value: T) -> list[T]:
    """Returns the values of all ranks, in rank order. A collective.

    Raises:
        EngineError: There are no other ranks (transport fake).
    """
    if _num_failed(engine, error=None) is None:
        return [value]
    return tell_everyone(value, own_group("all", [range(engine.plan.mesh.world_size)]))


def agree(engine: Engine, do: Callable[[], T]) -> T:
    """Returns the result of `do`. If it fails on one rank, all raise. A collective.

    Without a failure the ranks exchange one number.

    Raises:
        FullshardError: This rank's error, or that of the first rank that failed.
    """

    def exchange(failure: Any) -> list[Any]:
        return tell(engine, failure) if _num_failed(engine, error=failure) else []

    return raise_together(exchange, engine.rank, do)


def _num_failed(engine: Engine, *, error: Any) -> float | None:
    """Number of ranks with an error; None without other ranks. No rank may be in a step."""
    world_size = engine.plan.mesh.world_size
    if world_size == 1:
        return None
    if engine.transport.name == "fake":
        raise EngineError(
            f"expected {world_size} real ranks; transport fake has one. Save and load under "
            "another transport."
        )
    flag = torch.tensor([float(error is not None)], device=engine.device)
    asked = "what all ranks say (fs.save, fs.load, fs.owned)"
    return engine.norms.all_reduce(flag, asked).item()
