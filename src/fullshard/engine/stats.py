"""Measured memory and communication time of a sharded model on this rank."""

from __future__ import annotations

import math

from torch import nn

from fullshard.engine.engine import engine_of
from fullshard.engine.parameter import ShardedParameter


def memory_stats(model: nn.Module) -> dict[str, dict[str, int]]:
    """Returns the engine's bytes on this rank by kind: {"now", "peak"}; "total" is the sum.

    Kinds: parameter_shards, gradient_shards, shared_weights_to_compute_with, slots, gradient_slots,
    communication_buffers, deferred_gradients, buffers. Shared memory counts by this rank's part.
    """
    engine = engine_of(model)
    groups = engine.groups
    grads = [group.grads for group in groups if group.grads is not None]
    deferred = sum(group.deferred_bytes for group in groups)
    fixed = {
        "parameter_shards": sum(group.master.nbytes for group in groups),
        "gradient_shards": sum(grad.nbytes for grad in grads),
        "shared_weights_to_compute_with": sum(
            group.full.nbytes // group.plan.layout.num_parts
            for group in groups
            if group.plan.shared and group.full.dtype is not group.master.dtype
        ),
        "slots": engine.rings.num_bytes(gradients=False),
        "gradient_slots": engine.rings.num_bytes(gradients=True),
        "communication_buffers": sum(t.scratch.num_bytes for t in engine.transports.values()),
        "buffers": sum(buffer.nbytes for buffer in model.buffers()),
    }
    rows = {kind: {"now": size, "peak": size} for kind, size in fixed.items()}
    peak = max(deferred, engine.gradients.peak_deferred_bytes)
    rows["deferred_gradients"] = {"now": deferred, "peak": peak}
    rows["total"] = {when: sum(row[when] for row in rows.values()) for when in ("now", "peak")}
    return rows


def communication_seconds(model: nn.Module) -> float:
    """Returns the seconds that this rank issued and awaited collectives, since fs.shard.

    On a device with streams: the waits of the step's stream that have finished.
    """
    return engine_of(model).runtime.actions.seconds()


def num_parameters(model: nn.Module) -> int:
    """Returns the number of parameters of the full model, tied ones once, sharded or not."""
    return sum(
        math.prod(param.record.shape) if isinstance(param, ShardedParameter) else param.numel()
        for param in model.parameters()
    )
