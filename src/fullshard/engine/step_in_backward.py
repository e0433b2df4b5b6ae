"""A unit's update right after its reduction, inside of backward.

[Note: step in backward]
    usual    reduce 3, reduce 2, reduce 1, then the optimizer for all
    here     reduce 3, update 3, reduce 2, update 2, reduce 1, update 1

The update reads a gradient that is still in the cache. Nothing may wait for all gradients then: no
clipping, no scale of the loss, no step that is left out.

Backward may still read a unit's weights when its gradients are there (`x @ w.detach()`), on this
rank or, where ranks share them, on another, and autograd does not check what passes through hooks
on saved tensors (recompute). So only what no backward reads is updated early: masters whose weights
are gathered into slots, or cast. A unit that is gathered once more after its update is an error.
Where the masters themselves are computed with, the step is taken when backward has ended on all
ranks.

The user's own optimizer steps, with its groups narrowed to the unit: its states, rates and class
are what they are. What a rank did not touch and another did is updated when backward ends, too.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fullshard.engine._torch_compat import no_guard
from fullshard.engine.engine import Engine, engine_of
from fullshard.engine.optimizers import look_at, steps_by_itself
from fullshard.engine.owned import OwnedOptimizer
from fullshard.engine.unit import Member, Unit
from fullshard.errors import EngineError

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # of one optimizer
_NAME = "fs.step_in_backward"


class StepInBackward:
    """The updates of the backwards inside of one context.

    Args:
        engine: Of the model.
        optimizer: The user's.
    """

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
        self._engine, self._optimizer = engine, optimizer
        groups = optimizer.param_groups
        self._group_of = {id(p): at for at, group in enumerate(groups) for p in group["params"]}
        self._shares: dict[int, torch.Tensor] = {}  # of squared norms, by unit
        self._squares: torch.Tensor | None = None

    @property
    def grad_norm(self) -> torch.Tensor:
        """The 2-norm of the last backward's whole gradient, a plain float64 scalar.

        Parameters that are left out of sharding have no part in it.

        Raises:
            EngineError: No backward has reduced inside of the context.
        """
        if self._squares is None:
            raise EngineError(
                "grad_norm: expected a backward inside of fs.step_in_backward that reduced its "
                "gradients; there was none."
            )
        return self._squares.sum().sqrt()

    def update(self, unit: Unit) -> None:
        """The unit's gradients have landed."""
        if not self._shares:
            _refuse_hooks(self._engine, self._optimizer)  # put there inside of the context
        grads = [member.grad.to_local() for member in unit.trainees if member.grad is not None]
        records = [member.param.record for member in unit.trainees]
        self._shares[unit.index] = self._engine.norms.local_squares(grads, records)
        early = [group for group in unit.trained if not group.computes_with_master]
        unit.is_updated = self._step([m for group in early for m in group.members if m.touched])

    def squares(self, units: Iterable[Unit]) -> torch.Tensor:
        """(num_params,): this rank's shares of the squared norms, before the updates."""
        return torch.cat([self._shares[unit.index] for unit in units if unit.trainees])

    def finish(self, members: Sequence[Member], squares: torch.Tensor) -> None:
        """Backward is done on all ranks: update what was not yet.

        Args:
            members: These.
            squares: (num_params,), global sums of squares of all gradients.
        """
        self._squares = squares
        self._shares.clear()
        self._step(members)

    def _step(self, members: Sequence[Member]) -> bool:
        """Update those that the optimizer has; returns whether there are any."""
        members = [member for member in members if id(member.param) in self._group_of]
        if not members:
            return False
        with no_guard():
            for member in members:
                member.param.grad = member.grad
                member.updated = True
        try:
            with self._narrowed(members), self._engine.home.writes_unread():
                self._optimizer.step()
        finally:
            with no_guard():
                for member in members:
                    member.param.grad = None
        return True

    @contextmanager
    def _narrowed(self, members: Sequence[Member]) -> Generator[None]:
        """Inside, the optimizer has no other parameters."""
        groups = self._optimizer.param_groups
        before = [group["params"] for group in groups]
        for group in groups:
            group["params"] = []
        for member in members:
            groups[self._group_of[id(member.param)]]["params"].append(member.param)
        try:
            yield
        finally:
            for group, params in zip(groups, before, strict=True):
                group["params"] = params


@contextmanager
def step_in_backward(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Generator[StepInBackward]:
    """See `fs.step_in_backward`."""
    engine = engine_of(model)
    gradients = engine.gradients
    if gradients.updates is not None:
        raise EngineError(f"{_NAME}: expected one context at a time; got it in itself.")
    if gradients.defers:
        raise EngineError(
            f"{_NAME}: expected it around the last micro-batch; got it inside of fs.no_sync."
        )
    if optimizer not in gradients.tried:
        _check(optimizer)
        gradients.tried.add(optimizer)
    look_at(optimizer)  # its groups are narrowed when it steps
    _refuse_hooks(engine, optimizer)
    _refuse_strangers(engine, optimizer)
    gradients.updates = StepInBackward(engine, optimizer)
    try:
        yield gradients.updates
    finally:
        gradients.updates = None


def _check(optimizer: Any) -> None:
    """Whether its steps may be taken unit by unit.

    Raises:
        EngineError: It is no optimizer, steps whole tensors by owners, or would step otherwise.
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise EngineError(f"{_NAME}: expected a torch.optim.Optimizer; got {name}.")
    if isinstance(optimizer, OwnedOptimizer):
        raise EngineError(
            f"{_NAME}: expected an optimizer that steps on shards; got one of fs.owned, whose "
            "owners gather whole tensors. Step after backward."
        )
    if not steps_by_itself(optimizer):
        raise EngineError(
            f"{_NAME}: expected an optimizer that steps each parameter by itself; three steps of "
            f"{name} on two tensors together and one after the other differ, in what it writes or "
            "counts. Step after backward."
        )


def _refuse_hooks(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """Hooks that would see one unit where they expect all, or nothing at all.

    Raises:
        EngineError: There are such.
    """
    if any(getattr(optimizer, hooks) for hooks in _HOOKS):
        raise EngineError(
            f"{_NAME}: expected an optimizer without hooks on its steps, which are one a unit "
            "inside of backward. Remove them, or step after backward."
        )
    for member in (member for unit in engine.units for member in unit.trainees):
        if member.param.record.post_accumulate:
            raise EngineError(
                f"{_NAME}: expected no hooks on gradients; {member.piece.name} has one, and its "
                "gradient is used before the hook is called. Step after backward."
            )


def _refuse_strangers(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """An optimizer that has nothing to update.

    Raises:
        EngineError: None of its parameters is the model's.
    """
    theirs = {id(param) for group in optimizer.param_groups for param in group["params"]}
    if not any(id(m.param) in theirs for unit in engine.units for m in unit.trainees):
        raise EngineError(
            f"{_NAME}: expected an optimizer of the model's parameters; it has none that is "
            "trained."
        )
