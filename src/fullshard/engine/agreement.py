"""Exchange of values and errors between the ranks of an engine, outside of training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

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
    world_size = engine.plan.mesh.world_size
    if world_size == 1:
        return [value]
    if engine.transport.name == "fake":
        raise EngineError(
            f"expected {world_size} real ranks; transport fake has one. Save and load under "
            "another transport."
        )
    engine.norms.meet("what all ranks say (fs.save, fs.load, fs.owned)")  # no rank is in a step
    return tell_everyone(value, own_group("all", [range(world_size)]))


def agree(engine: Engine, do: Callable[[], T]) -> T:
    """Returns the result of `do`. If it fails on one rank, all raise. A collective.

    Raises:
        FullshardError: This rank's error, or that of the first rank that failed.
    """
    return raise_together(partial(tell, engine), engine.rank, do)
