"""torch.distributed's own collectives: NCCL, and gloo for comparison."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fullshard.config.values import Reduction as ReductionKind
from fullshard.engine._torch_compat import all_gather_single, reduce_scatter_single
from fullshard.engine.collectives.base import Axes, Fetch, Reduction
from fullshard.engine.collectives.direct import sum_in_order
from fullshard.engine.collectives.scratch import Scratch


class C10dTransport:
    """In-place all-gather and reduce-scatter on the process groups' backend."""

    name = "c10d"

    def __init__(self, axes: Axes, kind: ReductionKind) -> None:
        self._axes, self._kind = axes, kind
        self.rank = axes.rank
        self.scratch = Scratch()

    def fetch(self, full: torch.Tensor) -> Fetch:
        if self._axes.mesh.shard == 1:
            return _Done()
        own = full.chunk(self._axes.mesh.shard)[self._axes.shard_index]
        return all_gather_single(full, own, group=self._axes.gather_group, async_op=True)

    def reduce(
        self,
        full: torch.Tensor,
        accumulate_dtype: torch.dtype,  # noqa: ARG002 `land` writes into that dtype
    ) -> Reduction:
        if self._kind is ReductionKind.ORDERED:
            return _OrderedReduction(self._axes, full, self.scratch)
        return _NativeReduction(self._axes, full, self.scratch)

    def all_reduce(self, values: torch.Tensor, *, maximum: bool = False) -> None:
        if self._axes.mesh.world_size > 1:
            op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
            dist.all_reduce(values, op=op, group=self._axes.world_group)


class _Done:
    """Nothing travels."""

    def wait(self) -> None:
        """Return at once."""


class _NativeReduction:
    """Reduce-scatter in the wire dtype, all-reduce of the part over replicas."""

    __slots__ = ("_axes", "_part", "_scratch", "_work")

    def __init__(self, axes: Axes, full: torch.Tensor, scratch: Scratch) -> None:
        self._axes, self._scratch = axes, scratch
        self._work: Any = _Done()
        self._part = full
        if axes.mesh.shard > 1:
            self._part = scratch.take(full, full.numel() // axes.mesh.shard)
            self._work = reduce_scatter_single(
                self._part, full, group=axes.reduce_group, async_op=True
            )

    def land(self, out: torch.Tensor) -> None:
        self._work.wait()
        out.copy_(self._part)
        if self._axes.mesh.shard > 1:
            self._scratch.give(self._part)
        if self._axes.mesh.replicate > 1:
            dist.all_reduce(out, group=self._axes.replicate_group)


class _OrderedReduction:
    """All-to-all, then a local sum in rank order. See [Note: sums have an order]."""

    __slots__ = ("_axes", "_received", "_scratch", "_work")

    def __init__(self, axes: Axes, full: torch.Tensor, scratch: Scratch) -> None:
        self._axes, self._scratch = axes, scratch
        self._work: Any = _Done()
        self._received = full
        if axes.mesh.shard > 1:
            self._received = scratch.take(full, full.numel())
            self._work = dist.all_to_all_single(
                self._received, full, group=axes.reduce_group, async_op=True
            )

    def land(self, out: torch.Tensor) -> None:
        self._work.wait()
        sum_in_order(list(self._received.chunk(self._axes.mesh.shard)), out)
        if self._axes.mesh.shard > 1:
            self._scratch.give(self._received)
        replicas = self._axes.mesh.replicate
        if replicas > 1:
            everyone = self._scratch.take(out, replicas * out.numel())
            all_gather_single(everyone, out, group=self._axes.replicate_group)
            sum_in_order(list(everyone.chunk(replicas)), out)
            self._scratch.give(everyone)
