"""Global norms of sharded gradients, made once after each backward and kept.

[Note: cached norms]
After a backward every rank has the squared 2-norm of every parameter's whole gradient, from one
small all-reduce. So torch's own clipping is right, and a norm that one rank alone logs cannot
hang. An in-place change of any gradient makes the next norm a collective again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fullshard.engine._torch_compat import foreach_norm, no_guard
from fullshard.engine.collectives import Transport
from fullshard.planner.mesh import Mesh


class GradientNorms:
    """Squared 2-norms of the model's gradients, by parameter index.

    Args:
        transport: Sums over ranks.
        mesh: Ranks that hold the same part count it several times; where nothing is cut, every rank
            knows the norms by itself.
        device: Of the gradients.
    """

    def __init__(self, transport: Transport, mesh: Mesh, device: torch.device) -> None:
        self._transport = transport
        self._mesh = mesh
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
            return [norm.to(g.dtype) for norm, g in zip(found.unbind(), gradients, strict=True)]

    def total(self, tensors: Sequence[torch.Tensor], order: float) -> torch.Tensor:
        """The norm of all tensors together, a plain float64 scalar. A collective.

        Args:
            tensors: Plain local parts.
            order: p of the p-norm; `inf` for the largest absolute value.
        """
        return _join(self._powers(tensors, order), order)

    def known_total(self, gradients: Sequence[Any]) -> torch.Tensor | None:
        """The 2-norm of all gradients together if the cache has it."""
        if self._squares is None or any(id(g) not in self._shown for g in gradients):
            return None
        return self._squares[[g.record.index for g in gradients]].sum().sqrt()

    def share_found_inf(self, found_inf: torch.Tensor) -> None:
        """One rank's infinity is every rank's: all take the same step or none."""
        self._transport.all_reduce(found_inf, maximum=True)

    def _collect(self, gradients: Sequence[Any], order: float) -> torch.Tensor:
        powers = self._powers([gradient.to_local() for gradient in gradients], order)
        return powers if order == float("inf") else powers ** (1.0 / order)

    def _powers(self, tensors: Sequence[torch.Tensor], order: float) -> torch.Tensor:
        """(len(tensors),): sums of |x|^order over all ranks, or maxima for inf."""
        powers = local_powers(tensors, order, self._device)
        if self._mesh.shard == 1:
            return powers
        if order == float("inf"):
            self._transport.all_reduce(powers, maximum=True)
        else:
            self._transport.all_reduce(powers)
            powers /= self._mesh.replicate
        return powers


def local_powers(
    tensors: Sequence[torch.Tensor], order: float, device: torch.device
) -> torch.Tensor:
    """(len(tensors),), float64: this rank's sums of |x|^order (maxima for inf)."""
    powers = torch.zeros(len(tensors), dtype=torch.float64, device=device)
    filled = [i for i, tensor in enumerate(tensors) if tensor.numel()]
    if filled:
        norms = foreach_norm([tensors[i] for i in filled], order)
        values = torch.stack(list(norms)).to(torch.float64)
        powers[filled] = values if order == float("inf") else values**order
    return powers


def _join(powers: torch.Tensor, order: float) -> torch.Tensor:
    if order == float("inf"):
        return powers.max() if powers.numel() else powers.sum()
    return powers.sum() ** (1.0 / order)
