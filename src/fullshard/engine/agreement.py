"""What the ranks of an engine say to each other outside of training: answers, and errors."""

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
    """What each rank says, in rank order. A collective.

    Raises:
        EngineError: There are no other ranks to hear it (transport fake).
    """
    world_size = engine.plan.mesh.world_size
    if world_size == 1:
        return [value]
    if engine.transport.name == "fake":
        raise EngineError(
            f"expected {world_size} real ranks; transport fake has one. Save and load under "
            "another transport."
        )
    engine.norms.meet("what all ranks say (fs.save, fs.load, fs.owned)")  # none is in a step
    return tell_everyone(value, own_group("all", [range(world_size)]))


def agree(engine: Engine, do: Callable[[], T]) -> T:
    """Returns what `do` returns; if it fails on one rank, it raises on all. A collective.

    Raises:
        FullshardError: This rank's error, or the one of the first rank that failed.
    """
    return raise_together(partial(tell, engine), engine.rank, do)
