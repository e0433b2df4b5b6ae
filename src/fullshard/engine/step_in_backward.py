"""A unit's update right after its reduction, inside of backward.

[Note: step in backward]
    usual    reduce 3, reduce 2, reduce 1, then the optimizer for all
    here     reduce 3, update 3, reduce 2, update 2, reduce 1, update 1

The update reads a gradient that is still in the cache, and runs beside the backward of the units
before. Nothing may wait for all gradients then: no clipping, no scale of the loss, no step that is
left out. Every rank has handed in its gradients of the unit when their sum is there, so that no
backward reads the unit's weights any more, where they are shared as well.

The user's own optimizer steps, with its groups narrowed to the unit: its states, rates and class
are what they are. What a rank did not touch and another did is updated when backward ends.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fullshard.engine._torch_compat import no_guard
from fullshard.engine.engine import Engine, engine_of
from fullshard.engine.unit import Member, Unit
from fullshard.errors import EngineError

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # of one optimizer


class StepInBackward:
    """The updates of the backwards inside of one context.

    Args:
        engine: Of the model.
        optimizer: The user's.
    """

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
        self._engine, self._optimizer = engine, optimizer
        self._owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._squares: torch.Tensor | None = None

    @property
    def grad_norm(self) -> torch.Tensor:
        """The 2-norm of the last backward's whole gradient, a plain float64 scalar.

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
        """The unit's gradients have landed.

        Raises:
            EngineError: A backward that reads its weights is still to come.
        """
        if self._engine.runtime.scheduler.awaits_backward(unit.index):
            raise EngineError(
                f"fs.step_in_backward: expected one backward for all forwards; got one of "
                f"{unit.plan.title} while another of its forwards waits for its own, which would "
                "read updated weights. Add the losses and call backward once."
            )
        self._step([member for member in unit.trainees if member.touched])

    def finish(self, members: Sequence[Member], squares: torch.Tensor) -> None:
        """Backward is done: update what some rank touched and this one did not.

        Args:
            members: These.
            squares: (num_params,), global sums of squares of all gradients.
        """
        self._squares = squares
        self._step(members)

    def _step(self, members: Sequence[Member]) -> None:
        members = [member for member in members if id(member.param) in self._owned]
        if not members:
            return
        with no_guard():
            for member in members:
                member.param.grad = member.grad
                member.updated = True
        try:
            with _narrowed(self._optimizer, {id(member.param) for member in members}):
                with self._engine.home.own_parts():
                    type(self._optimizer).step(self._optimizer)
        finally:
            with no_guard():
                for member in members:
                    member.param.grad = None


@contextmanager
def step_in_backward(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Generator[StepInBackward]:
    """See `fs.step_in_backward`."""
    engine = engine_of(model)
    gradients = engine.gradients
    if gradients.updates is not None:
        raise EngineError("fs.step_in_backward: expected one context at a time; got it in itself.")
    gradients.updates = StepInBackward(engine, optimizer)
    try:
        yield gradients.updates
    finally:
        gradients.updates = None


@contextmanager
def _narrowed(optimizer: Any, params: set[int]) -> Generator[None]:
    """Inside, the optimizer has no other parameters and calls no hooks of its own.

    Raises:
        EngineError: It keeps more than settings in its groups.
    """
    groups = optimizer.param_groups
    before = [dict(group) for group in groups]
    hooks = {name: getattr(optimizer, name) for name in _HOOKS}
    for name in _HOOKS:
        setattr(optimizer, name, OrderedDict())
    for group in groups:
        group["params"] = [param for param in group["params"] if id(param) in params]
    try:
        yield
    finally:
        for name, value in hooks.items():
            setattr(optimizer, name, value)
        for group, old in zip(groups, before, strict=True):
            group["params"] = old["params"]
    for group, old in zip(groups, before, strict=True):
        changed = [key for key in group if group[key] is not old.get(key)]
        if changed:
            raise EngineError(
                f"fs.step_in_backward: expected an optimizer that steps each parameter for itself; "
                f"{type(optimizer).__name__} changed {changed[0]!r} of its group, which each unit "
                "would change again. Step after backward."
            )
