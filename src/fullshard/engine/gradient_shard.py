"""A group's reduced gradients on this rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.engine.homes import DeviceHomes
from fullshard.engine.norms import local_powers
from fullshard.planner.units import DtypeContract
from fullshard.transport.base import torch_dtype


class GradientShard:
    """Sums of gradients, and what `p.grad` shows of them.

    Attributes:
        sums: (part_numel,), accumulate dtype.
        shown: (part_numel,), master dtype, what `p.grad` views; the sums themselves if these
            have that dtype.
        partial: (part_numel,), accumulate dtype: summed over shards, not yet over replicas.
        kept: Whether each `p.grad` was there before, so that the next sum is added; () if none was.
        memory: Storage of `shown`.
        holders: Reference counts of the memory and of each gradient when only the engine holds
            them.
        disk: Has the sums; None: memory has them.
        bounds: Where each parameter's gradient is.
        squares: (1,) each: squared norms of gradients that have just been written to disk.
        like: An empty tensor of the dtype and device that reductions are received in.
    """

    def __init__(self, numel: int, dtypes: DtypeContract, homes: DeviceHomes) -> None:
        self._made_with = numel, dtypes, homes
        self.sums = homes.gradients.zeros(numel, torch_dtype(dtypes.accumulate))
        self.shown = self.sums
        if dtypes.master is not dtypes.accumulate:
            self.shown = homes.gradients.zeros(numel, torch_dtype(dtypes.master))
        self.partial: torch.Tensor | None = None
        self.kept: Sequence[bool] = ()
        self.memory = self.shown.untyped_storage()
        self.holders: list[int] = []
        self.is_offloaded = homes.offloads_gradients
        self.disk = homes.gradients.disk
        self.bounds: list[slice] = []
        self.squares: list[torch.Tensor] = []
        self.like = torch.empty(0, dtype=self.sums.dtype, device=homes.device)

    @property
    def nbytes(self) -> int:
        return self.sums.nbytes + (0 if self.shown is self.sums else self.shown.nbytes)

    def anew(self) -> GradientShard:
        """Return a zero shard of the same kind, with the sum that waits for replicas."""
        made = GradientShard(*self._made_with)
        made.partial = self.partial
        return made

    def take(self, total: torch.Tensor) -> None:
        """Add a sum over all ranks to the shown gradients, or replace them.

        Args:
            total: (part_numel,), accumulate dtype, divided; `sums` or another buffer.
        """
        if self.kept:
            self._take_writes()
            self.sums.add_(total)
        elif total is not self.sums:
            self.sums.copy_(total)
        self.show()

    def take_to_host(self, total: torch.Tensor, *room: torch.Tensor) -> None:
        """Queue what `take` does if the sums are in host memory; `show` follows after a wait.

        Args:
            total: (part_numel,), accumulate dtype, divided, on the device.
            room: (part_numel,), on the device, if the sum is added to what is shown in memory.
        """
        if self.kept:
            self._take_writes()
        if self.disk is None:
            for before in room:  # one at most
                total.add_(before.copy_(self.sums, non_blocking=True))
            self.sums.copy_(total, non_blocking=True)
        elif self.kept:
            self.disk.change(self.sums, lambda x, more: x.add_(more.to(x)), total)
        else:
            self.disk.change(self.sums, torch.Tensor.copy_, total, reads=False)
            if self.shown is self.sums and total.device.type == "cpu":
                parts = [total[bounds] for bounds in self.bounds]
                self.squares = list(local_powers(parts, 2.0, total.device).split(1))

    def take_squares(self) -> list[torch.Tensor | None]:
        """Squared norms that are known since the sums were written, once."""
        found, self.squares = self.squares or [None] * len(self.bounds), []
        return [*found]

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply all gradients."""
        self._take_writes()
        factor = factor.to(self.sums)
        if self.disk is None:
            self.sums.mul_(factor)
        else:
            self.disk.change(self.sums, lambda piece: piece.mul_(factor))
        self.show()

    def show(self) -> None:
        """Cast the sums into `shown`."""
        if self.shown is not self.sums:
            self.shown.copy_(self.sums)

    def _take_writes(self) -> None:
        """Copy the user's writes to `p.grad` into the sums; other elements keep their precision."""
        if self.shown is not self.sums:
            wrote = self.shown != self.sums.to(self.shown.dtype)
            self.sums.copy_(torch.where(wrote, self.shown.to(self.sums.dtype), self.sums))
