"""Messages between two ranks over gloo, and comparisons of what ranks are about to exchange.

[Note: places]
gloo aborts the process if a message is longer than its receiver expects, and confuses messages of
equal length. A rank that skips a backward would send messages of its forward to ranks in backward.
Ranks therefore compare their phases (a forward, a backward, a sum) before the first message of
each, and the unit of every gather. Both have one tag: a rank that gathers once more than another
compares its unit with the other's phase. NCCL neither aborts nor needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fullshard.errors import EngineError
from fullshard.transport.base import TAGS_A_MODEL, Axes, Transport, Works, failed_message

PLACE_TAG = 0  # over all models, since ranks may run different ones
PLACE_BYTES = 96
_CURE = (
    "One of them left out or added a forward, a backward, a unit's call or a question that spans "
    "all ranks (p.norm(), p.grad.mean()), or raised an error that it caught: all ranks must make "
    "the same calls. Where a rank has no loss, multiply one by zero; let ranks agree on a branch "
    "(dist.broadcast), or make a recomputed block of which each runs other parts one unit (wrap)."
)


class MessageTransport(Transport):
    """A transport that compares places. See [Note: places].

    Without a first tag it sends no messages and compares nothing.
    """

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        number = axes.first_tag // TAGS_A_MODEL
        self._model = f" (sharded model {number})" if number > 1 else ""
        self._compares = axes.first_tag > 0

    def _exchange(
        self,
        sends: Sequence[torch.Tensor],
        receives: Sequence[torch.Tensor],
        ranks: Sequence[int],
        tag: int,
    ) -> list[Any]:
        """Exchange a tensor with each of the other ranks, as bytes, since gloo lacks dtypes."""
        group, works = self.axes.world_group, []
        tag = tag + self.axes.first_tag if tag != PLACE_TAG else tag
        try:
            for rank, send, receive in zip(ranks, sends, receives, strict=True):
                if rank != self.rank and send.numel():
                    works.append(dist.isend(send.view(torch.uint8), rank, group=group, tag=tag))
                if rank != self.rank and receive.numel():
                    works.append(dist.irecv(receive.view(torch.uint8), rank, group=group, tag=tag))
        except RuntimeError as error:  # gloo knows already that a rank has ended
            raise failed_message(error, self.phase.running or "a message") from error
        return works

    def _compare_places(self, ranks: Sequence[int]) -> None:
        """Check that all ranks are in the same phase. See [Note: places].

        Raises:
            EngineError: Ranks are, or were, in different phases.
        """
        phase = self.phase
        if len(ranks) == 1 or not (phase.following or phase.apart) or not self._compares:
            return
        phase.running, phase.following = f"{phase.following}{self._model}", ""
        self._start_comparison(phase.running, range(self.axes.mesh.world_size))()

    def _compare_units(self, unit: str) -> Callable[[], None]:
        """Compare places, and start to compare the unit of a gather; the result raises an error."""
        self._compare_places(self.axes.shard_ranks)
        if not unit or not self._compares:
            return lambda: None
        place = f"{self.phase.running}, a gather of {unit}"
        return self._start_comparison(place, self.axes.shard_ranks)

    def _start_comparison(self, own: str, ranks: Sequence[int]) -> Callable[[], None]:
        if self.phase.apart:
            raise EngineError(self.phase.apart)
        size = len(ranks)
        text = bytearray(own.encode()[-PLACE_BYTES:].ljust(PLACE_BYTES) * size)
        texts = torch.frombuffer(text, dtype=torch.uint8).view(size, PLACE_BYTES)
        mine = texts[ranks.index(self.rank)].clone()
        works = self._exchange([mine] * size, list(texts), ranks, PLACE_TAG)

        def compare() -> None:
            Works(works, own).wait()
            places = [bytes(place).decode(errors="replace").strip() for place in texts.tolist()]
            here = bytes(mine.tolist()).decode(errors="replace").strip()
            found = [
                f"rank {r} is at {it}" for r, it in zip(ranks, places, strict=True) if it != here
            ]
            if found:
                self.phase.apart = (
                    f"{here}: expected every rank to come here; {', '.join(found)}. {_CURE}"
                )
                raise EngineError(self.phase.apart)

        return compare
