"""Ranks of one host that map one copy: nothing is gathered, and gradients are pulled.

    weights     one mapping for all ranks; each updates its own part
    gradients   every rank collects into its own slot, which all others map; each sums its own part
                out of all slots, in rank order, in place

What is not in shared memory (full state dicts, whole tensors, sums over the replicate axis) travels
directly. See [Note: who may write when] in `home.py`.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from fullshard.planner.layout import align
from fullshard.transport.base import Axes, Fetch, Home, Reduction
from fullshard.transport.direct import (
    DirectTransport,
    combine_in_order,
    sum_in_order,
)
from fullshard.transport.shared.board import CACHE_LINE, Board, Mark, Peers
from fullshard.transport.shared.home import SharedHome
from fullshard.transport.shared.segment import Exchange, share_segment

LANE_BYTES = 65536  # that a small sum moves at once
SAID_BYTES = 1024  # of an address or of an error, while segments are made


class SharedTransport:
    """Pulls gradients out of peers' slots.

    Args:
        axes: All ranks of the shard axis are on one host.
        direct: For all that is not in shared memory.
        peers: The other ranks of the shard axis.
        exchange: Lets the ranks of the shard axis hear each other until they share memory.
    """

    name = "shared"

    def __init__(
        self, axes: Axes, direct: DirectTransport, peers: Peers, exchange: Exchange
    ) -> None:
        self._axes, self._direct = axes, direct
        self.rank = axes.rank
        self.scratch = direct.scratch
        parts, part = axes.mesh.shard, axes.shard_index
        lanes = align(Board.bytes_of(parts), CACHE_LINE)
        own = (lanes + part * 2 * LANE_BYTES, 2 * LANE_BYTES)
        total = lanes + parts * 2 * LANE_BYTES
        segment = share_segment(part, total, [own, (0, lanes)][: 2 - bool(part)], exchange)
        self._board = Board(segment, part, peers)
        self._lanes = [
            segment.view(lanes + i * 2 * LANE_BYTES, 2 * LANE_BYTES, torch.uint8).view(2, -1)
            for i in range(parts)
        ]
        self._summed = 0
        self._gradients = SharedHome(self._board, parts, self._exchange)
        self.home: Home = self._gradients

    def fetch(self, fulls: Sequence[torch.Tensor]) -> Fetch:
        return self._direct.fetch(fulls)

    def reduce(self, fulls: Sequence[torch.Tensor]) -> Reduction:
        return _PulledReduction(self._gradients, fulls)

    def sum_replicas(self, values: torch.Tensor) -> None:
        self._direct.sum_replicas(values)

    def all_reduce(self, values: torch.Tensor, *, maximum: bool = False) -> None:
        if self._axes.mesh.replicate > 1:
            self._direct.all_reduce(values, maximum=maximum)
            return
        for chunk in values.view(-1).split(LANE_BYTES // values.element_size()):
            vectors = [lane.view(chunk.dtype) for lane in self._meet(chunk.view(torch.uint8))]
            combine_in_order(vectors, chunk, maximum=maximum)

    def _exchange(self, value: Any) -> list[Any]:
        """What every part says, while segments are made."""
        said = pickle.dumps(value).ljust(SAID_BYTES)
        assert len(said) == SAID_BYTES, value
        lanes = self._meet(torch.frombuffer(bytearray(said), dtype=torch.uint8))
        return [pickle.loads(bytes(lane.tolist())) for lane in lanes]

    def _meet(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Every part's bytes, in order, until the next meeting.

        Two lanes a rank, in turn: who puts down a second vector has read all first ones.
        """
        self._summed += 1
        turn, part = self._summed % 2, self._board.part
        lanes = [lanes[turn, : own.numel()] for lanes in self._lanes]
        lanes[part].copy_(own)
        self._board.tell(Mark.SUMMED, self._summed)
        self._board.await_all(Mark.SUMMED, self._summed, "a sum over all ranks")
        return lanes


class _PulledReduction:
    """This rank's part of every rank's slot, read in place."""

    __slots__ = ("_fulls", "_home", "_number")

    def __init__(self, home: SharedHome, fulls: Sequence[torch.Tensor]) -> None:
        self._home, self._fulls = home, fulls
        self._number = home.show(fulls)

    def land(self, outs: Sequence[torch.Tensor]) -> None:
        pulled = self._home.pull(self._number, self._fulls)
        for out, parts in zip(outs, pulled, strict=True):
            sum_in_order(parts, out)
        self._home.let_go(self._number)
