"""The full parameters that a forward sees, and what becomes of one that somebody keeps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fullshard.engine._torch_compat import (
    GRAD,
    graph_task_id,
    is_compiling,
    no_guard,
    tree_leaves,
)
from fullshard.engine.guard import Rule, rule_of
from fullshard.errors import ShardedTensorError
from fullshard.planner.layout import clean_name


class Computed(nn.Parameter):
    """The full parameter that forward sees. Writes into its `.data` are detected.

    torch's `.data` has a separate version counter, which `Unit.check_writes` would miss. In a
    forward `.grad` is that of the shard. Autograd and the compiler have their own.
    """

    __slots__ = ("member",)
    data = property(torch.Tensor.detach, torch.Tensor.data.__set__)  # type: ignore[assignment]

    def shard(self) -> Any:
        """The shard; None of a copy, or if the model was deleted."""
        member = getattr(self, "member", _nobody)()
        return None if member is None else member.param

    def _read_grad(self) -> Any:
        shard = self.shard()
        # In a backward, hooks of tensor parallelism sum what autograd has put there.
        if shard is None or is_compiling() or graph_task_id() != -1:
            return GRAD.__get__(self)
        return shard.grad

    def _write_grad(self, value: Any) -> None:
        shard = self.shard()
        if shard is None:
            GRAD.__set__(self, value)
        else:
            shard.grad = value

    grad = property(_read_grad, _write_grad, lambda self: self._write_grad(None))  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


def _nobody() -> None:
    """What a weak reference to a deleted object returns."""


class Released(Computed):
    """A compute parameter while its slot may contain another unit. It has no values to read.

    Only a parameter that somebody kept is seen then: in a list that a hook fills, or in a cache.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule, name = rule_of(func)
        if rule not in (Rule.PLAIN, Rule.ASSIGN) and name not in ("__repr__", "data_ptr"):
            kept = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, cls)).member()
            if kept is None:
                raise ShardedTensorError(
                    f"{name} of a weight kept from a forward: its model was deleted. Keep a copy "
                    "(weight.clone())."
                )
            raise ShardedTensorError(
                f"{name} of {clean_name(kept.piece.name)!r}, kept from its unit's forward: "
                f"expected a use inside {kept.group.unit.plan.title}, whose slot is reused "
                "after it. Keep a copy (weight.clone()), compute penalties in the hook that "
                "sees the weight, or read the model's own parameter (p.full_tensor())."
            )
        with no_guard():
            return func(*args, **(kwargs or {}))
