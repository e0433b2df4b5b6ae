"""What the ranks of an engine say to each other outside of training: answers, and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from fullshard.errors import (
    CheckpointError,
    EngineError,
    FullshardError,
    OutOfMemoryError,
    ran_out_of_memory,
)
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
    """Do something that is no collective; where one rank fails, all raise. A collective.

    Raises:
        FullshardError: This rank's own, or the text of the first rank's that failed.
    """
    result: Any = None
    error: Exception | None = None
    try:
        result = do()
    except Exception as caught:  # noqa: BLE001  whatever it is, the other ranks must hear of it
        error = caught
        if isinstance(caught, OSError) and not ran_out_of_memory(caught):
            place, why = caught.filename or "files of the run", caught.strerror or caught
            advice = "Make room, or correct the path or its permissions, and start again."
            error = CheckpointError(f"{place}: expected to read or write, got {why}. {advice}")
            error.__cause__ = caught
    told = tell(engine, None if error is None else _as_told(error, engine.rank))
    if error is not None:
        raise error
    first = next((entry for entry in told if entry is not None), None)
    if first is not None:
        raise first[0](first[1])
    return result


def _as_told(error: Exception, rank: int) -> tuple[type[FullshardError], str]:
    """What the other ranks raise."""
    if isinstance(error, FullshardError):
        return type(error), str(error)
    kind = OutOfMemoryError if ran_out_of_memory(error) else EngineError
    return kind, f"rank {rank}: {type(error).__name__}: {error}"
