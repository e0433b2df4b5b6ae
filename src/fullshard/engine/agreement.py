"""What ranks say to each other: sums that carry what all must say alike, answers, errors.

[Note: what ranks say]
A rank that leaves out a backward, a step or a question shifts its later sums against the others',
and numbers of one would meet numbers of another. So each sum carries integers in front that must be
equal: what it is of, and how far the rank has come. The sum itself tells: n numbers are equal
exactly when n times the sum of their squares is the square of their sum.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fullshard.errors import (
    CheckpointError,
    EngineError,
    FullshardError,
    OutOfMemoryError,
    ran_out_of_memory,
)
from fullshard.transport import Transport
from fullshard.transport.groups import own_group, tell_everyone

if TYPE_CHECKING:
    from fullshard.engine.engine import Engine

T = TypeVar("T")
_MOST = 1 << 20  # so that sums of squares stay exact in float64


class Alike:
    """The small sums of one model. See [Note: what ranks say]."""

    def __init__(self) -> None:
        self._landing: tuple[torch.Tensor, str, dict[str, int], torch.cuda.Event] | None = None

    def all_reduce(
        self,
        transport: Transport,
        values: torch.Tensor,
        asked: str,
        said: Mapping[str, int] | None = None,
        *,
        maximum: bool = False,
    ) -> torch.Tensor:
        """(n,), float64: all ranks' values summed, or the largest of them. A collective.

        Args:
            transport: Sums.
            values: (n,), without NaN where the largest are asked for.
            asked: What they are.
            said: Counts that are the same on every rank, by what is counted.
            maximum: The largest.

        Raises:
            EngineError: Ranks ask for different things, or their counts differ. Devices that the
                host does not wait for raise it in the next call.
        """
        said = {"": zlib.crc32(f"{asked} {len(values)}".encode()), **(said or {})}
        numbers = [float(number % _MOST) for number in said.values()]
        pairs = [(x, -x) if maximum else (x, x * x) for x in numbers]
        head = from_host([1.0, *(x for pair in pairs for x in pair)], values.device)
        vector = torch.cat([head, values.double()])
        transport.home.place = f"a sum ({asked})"
        transport.all_reduce(vector, maximum=maximum)
        head, values = vector[: len(head)], vector[len(head) :]
        if is_at_hand(vector):
            wrong = _differing(head, said, maximum=maximum)
            if wrong is not None:
                told = wrong and _table(transport, said[wrong], int(head[0]))
                raise _refusal(asked, wrong, told)
        elif not maximum:
            self._look_later(head, asked, said)
        return values

    def _look_later(self, head: torch.Tensor, asked: str, said: dict[str, int]) -> None:
        """Look at the last sum, which has most likely landed by now, and keep this one."""
        if self._landing is not None:
            landed, before, counts, landing_done = self._landing
            landing_done.synchronize()
            wrong = _differing(landed, counts, maximum=False)
            if wrong is not None:
                raise _refusal(before, wrong, f"here it is {counts[wrong]}, elsewhere not")
        landing = torch.zeros(len(head), dtype=torch.float64, pin_memory=True)
        landing.copy_(head, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        self._landing = landing, asked, said, done


def is_at_hand(tensor: torch.Tensor) -> bool:
    """Whether the host reads it without waiting for a device."""
    return tensor.device.type == "cpu"


def from_host(
    numbers: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """(len(numbers),): numbers that the host knows, on a device that it does not wait for."""
    held = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return held.to(device, non_blocking=True)


def _differing(head: torch.Tensor, said: Mapping[str, int], *, maximum: bool) -> str | None:
    """What the ranks do not say alike."""
    ranks, *sums = head.tolist()
    for what, total, other in zip(said, sums[::2], sums[1::2], strict=True):
        if (total != -other) if maximum else (ranks * other != total * total):
            return what
    return None


def _table(transport: Transport, number: int, num_ranks: int) -> str:
    """Who says what. A collective of ranks that have all found a difference."""
    table = torch.zeros(num_ranks, dtype=torch.float64)
    table[transport.rank] = number
    transport.all_reduce(table)
    counts = [int(count) for count in table.tolist()]
    usual = Counter(counts).most_common(1)[0][0]
    strange = [f"rank {rank} has made {n}" for rank, n in enumerate(counts) if n != usual]
    return f"{', '.join(strange)}, the others {usual}"


def _refusal(asked: str, wrong: str, found: str) -> EngineError:
    if not wrong:
        return EngineError(
            f"{asked}: expected the same call on every rank; another rank is elsewhere, and its "
            "numbers would have met these. Call it on every rank, and let one of them log it; "
            "p.to_local() has this rank's elements."
        )
    return EngineError(
        f"{asked}: expected as many {wrong} on every rank; {found}. Every rank must make each "
        "backward, optimizer.step(), zero_grad() and clipping: multiply the loss by zero where "
        "there is none, and evaluate under torch.no_grad()."
    )


# ---- outside of training


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
    nothing = torch.zeros(1, device=engine.device)  # no rank may be in a step
    engine.norms.all_reduce(nothing, "what all ranks say (fs.save, fs.load, fs.owned)")
    return tell_everyone(value, own_group("all", [range(world_size)], 0))


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
