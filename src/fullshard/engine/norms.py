"""Global norms of sharded gradients, made once after each backward and kept.

[Note: cached norms]
After a backward every rank has the squared 2-norm of every parameter's whole gradient, from one
small all-reduce. So torch's own clipping is right, and a norm that one rank alone logs cannot
hang. An in-place change of any gradient makes the next norm a collective again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from fullshard.engine._torch_compat import foreach_norm, no_guard
from fullshard.engine.collectives import Transport

if TYPE_CHECKING:
    from fullshard.engine.parameter import ShardRecord


class GradientNorms:
    """Squared 2-norms of the model's gradients, by parameter index.

    Args:
        transport: Sums over ranks.
        device: That collectives work on.
    """

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self._transport = transport
        self._device = device
        self._squares: torch.Tensor | None = None
        self._shown: dict[int, Any] = {}  # id of each gradient that the cache speaks of

    def keep(self, squares: torch.Tensor, shown: dict[int, Any]) -> None:
        """Remember the squared norms of this backward's gradients.

        Args:
            squares: (num_params,), global sums of squares.
            shown: The gradient objects that they belong to, by id.
        """
        self._squares, self._shown = squares, shown

    def note_write(self, gradient: Any) -> None:
        """A function writes into a gradient, or into what was made of one."""
        if self._knows(gradient):
            self.mark_changed()

    def _knows(self, gradient: Any) -> bool:
        """Whether a gradient is one of those kept, or an alias of one (`p.grad.data`)."""
        return id(getattr(gradient, "alias_of", gradient)) in self._shown

    def mark_changed(self) -> None:
        """A gradient was changed in place, or a backward is under way."""
        self._squares = None

    def scale(self, factor: torch.Tensor) -> None:
        """All gradients were multiplied by a factor."""
        if self._squares is not None:
            self._squares = self._squares * factor.to(self._squares) ** 2

    def of(self, gradients: Sequence[Any], order: float) -> list[torch.Tensor]:
        """The norm of each whole gradient: plain scalars in the gradient's dtype.

        A collective unless the cache knows them (2-norms of unchanged gradients).
        """
        if order == 2.0 and self._squares is not None and all(map(self._knows, gradients)):
            found = self._squares[[g.record.index for g in gradients]].sqrt()
        else:
            found = self._collect(gradients, order)
        with no_guard():
            return [norm.to(g) for norm, g in zip(found.unbind(), gradients, strict=True)]

    def total(self, shards: Sequence[Any], order: float) -> torch.Tensor:
        """The norm of all shards together, a plain float64 scalar. A collective.

        Args:
            shards: Parameters, gradients or states of one model.
            order: p of the p-norm; `inf` for the largest absolute value.
        """
        return _join(self._powers(shards, order), order)

    def local_squares(
        self, tensors: Sequence[torch.Tensor], records: Sequence[ShardRecord]
    ) -> torch.Tensor:
        """(len(tensors),): this rank's share of the squared norms: their sum over ranks is whole.

        Args:
            tensors: Plain local parts.
            records: Of the shards that they are.
        """
        squares = local_powers(tensors, 2.0, self._device)
        if any(record.copies > 1 for record in records):
            squares = squares / self._copies(records)
        return squares

    def known_total(self, gradients: Sequence[Any]) -> torch.Tensor | None:
        """The 2-norm of all gradients together if the cache has it."""
        if self._squares is None or any(id(g) not in self._shown for g in gradients):
            return None
        return self._squares[[g.record.index for g in gradients]].sum().sqrt()

    def share_found_inf(self, found_inf: torch.Tensor) -> None:
        """One rank's infinity is every rank's: all take the same step or none."""
        shared = found_inf.to(self._device)
        self._transport.all_reduce(shared, maximum=True)
        found_inf.copy_(shared)

    def _collect(self, gradients: Sequence[Any], order: float) -> torch.Tensor:
        powers = self._powers(gradients, order)
        return powers if order == float("inf") else powers ** (1.0 / order)

    def _powers(self, shards: Sequence[Any], order: float) -> torch.Tensor:
        """(len(shards),): sums of |x|^order over all ranks, or maxima for inf."""
        powers = local_powers([shard.to_local() for shard in shards], order, self._device)
        if not any(shard.record.is_cut for shard in shards):
            return powers  # every rank knows them by itself
        if order == float("inf"):
            self._transport.all_reduce(powers, maximum=True)
        else:
            powers = powers / self._copies([shard.record for shard in shards])
            self._transport.all_reduce(powers)
        return powers

    def _copies(self, records: Sequence[ShardRecord]) -> torch.Tensor:
        """Ranks that hold the same elements count them several times."""
        counts = [record.copies for record in records]
        return torch.tensor(counts, dtype=torch.float64).to(self._device)


def local_powers(
    tensors: Sequence[torch.Tensor], order: float, device: torch.device
) -> torch.Tensor:
    """(len(tensors),), float64: this rank's sums of |x|^order (maxima for inf)."""
    powers = torch.zeros(len(tensors), dtype=torch.float64, device=device)
    filled = [i for i, tensor in enumerate(tensors) if tensor.numel()]
    if filled:
        norms = foreach_norm([tensors[i] for i in filled], order)
        if len({(norm.dtype, norm.device) for norm in norms}) > 1:
            norms = [norm.to(device, torch.float64) for norm in norms]
        values = torch.stack(norms).to(device, torch.float64)
        values = values if order == float("inf") else values**order
        if len(filled) == len(tensors):
            return values
        powers[filled] = values
    return powers


def _join(powers: torch.Tensor, order: float) -> torch.Tensor:
    if order == float("inf"):
        return powers.max() if powers.numel() else powers.sum()
    return powers.sum() ** (1.0 / order)
