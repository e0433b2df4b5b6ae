"""The order of units from a sample input, traced under fake tensors: no compute, no memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fullshard.engine._torch_compat import tree_map_only
from fullshard.errors import ConfigError
from fullshard.planner.plan import Plan
from fullshard.planner.schedule import nominal_trace


def trace_order(model: nn.Module, plan: Plan, sample: Any) -> Plan:
    """The plan in the order in which forward enters its units on a sample.

    Args:
        model: Not yet sharded.
        plan: In registration order.
        sample: Arguments of forward: a mapping of keywords, a sequence, or one value.

    Raises:
        ConfigError: Forward does not run on the sample; its error is the cause.
    """
    forward: list[int] = []
    handles = [
        model.get_submodule(unit.name).register_forward_pre_hook(
            partial(_note, forward, unit.index)
        )
        for unit in plan.units
    ]
    try:
        _run_fake(model, sample)
    except Exception as error:
        raise ConfigError(
            f"sample: expected arguments that {type(model).__name__}.forward takes; it raised "
            f"{type(error).__name__}: {error}. Leave sample out to learn the order in step one."
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    leaves = [index for what, index in nominal_trace(plan.units, forward) if what == "leave"]
    reached = set(plan.order.backward)
    backward = [index for index in reversed(leaves) if index in reached]
    return plan.reordered(forward, backward, learned=False)


def _note(forward: list[int], index: int, *_: Any) -> None:
    forward.append(index)


def _run_fake(model: nn.Module, sample: Any) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = tree_map_only(torch.Tensor, mode.from_tensor, sample)
    rng = torch.get_rng_state()
    held = [(table, dict(table)) for table in _tensor_tables(model)]
    try:
        for table, real in held:  # running statistics must not move
            table.update({k: t if t is None else mode.from_tensor(t) for k, t in real.items()})
        with mode, torch.no_grad():
            if isinstance(fake, Mapping):
                model(**fake)
            elif isinstance(fake, Sequence) and not isinstance(fake, torch.Tensor | str):
                model(*fake)
            else:
                model(fake)
    finally:
        for table, real in held:
            table.update(real)
        torch.set_rng_state(rng)


def _tensor_tables(model: nn.Module) -> list[dict[str, Any]]:
    """Where the model keeps its parameters and buffers."""
    return [t for m in model.modules() for t in (m._parameters, m._buffers)]
