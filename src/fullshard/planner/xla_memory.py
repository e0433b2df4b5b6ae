"""What a step on XLA holds beside its state, at the fuller of two moments.

    the head       what forward kept, the gathered head, logits, the gradient of its weight
    the last block what forward kept, gradient shards, that gradient, one block with its gradients

The two are not held together: gradient shards of blocks come into being when logits are gone. What
forward kept is read off the traced program (xla/residuals.py); a cotangent takes the place of the
activation that made it. `fullshard plan --exact` asks XLA, and compares.

Compilers differ, in what was seen in their buffers: those of accelerators fuse the exponentials of
the loss and drop the gathered embedding when it was read. CPU's keeps two more arrays of the size
of the logits (exponentials; the label's gradient), the embedding, and the shards that a loop hands
to backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fullshard.planner.arrays import ArrayPlan, ArraysPlan
from fullshard.planner.memory import MemoryRow
from fullshard.planner.spec import ITEMSIZE

WIDE = 4  # bytes, at least, of the logits that the loss is computed from


@dataclass(frozen=True, slots=True)
class StepShape:
    """A device's micro-batch.

    Attributes:
        num_logits: Tokens times vocabulary.
        kept_bytes: That forward keeps for backward.
        shard_bytes: Of parameters, handed to backward beside these.
        block_bytes: That one block keeps where nothing is computed anew.
        accumulates: Whether there are several micro-batches: their sum is there all the time.
        on_cpu: Whose compiler it is.
    """

    num_logits: int
    kept_bytes: int
    shard_bytes: int
    block_bytes: int
    accumulates: bool
    on_cpu: bool


def at_peak(table: ArraysPlan, shape: StepShape) -> tuple[MemoryRow, ...]:
    """Rows of a device, which add up to its peak."""
    rows = {row.name: row for row in table.memory}
    state = [rows["parameter shards"], rows["optimizer (AdamW)"]]
    kept = shape.kept_bytes + shape.shard_bytes * shape.on_cpu
    always = [*state, MemoryRow("activations", kept)]
    gradients = rows["gradient shards"]
    if shape.accumulates:
        always.append(gradients)
    head = _at_the_head(table, shape)
    block = _at_a_block(table, shape)
    if not shape.accumulates:
        block.insert(0, gradients)
    return (*always, *max(head, block, key=lambda rows: sum(row.num_bytes for row in rows)))


def _at_the_head(table: ArraysPlan, shape: StepShape) -> list[MemoryRow]:
    outside = [array for array in table.arrays if not array.block]
    large = [_whole_bytes(array, "compute") for array in outside if array.cut.dim is not None]
    held = sum(large) if shape.on_cpu else max(large, default=0)
    compute = max(ITEMSIZE[array.dtypes.compute] for array in table.arrays)
    wide = max(compute, WIDE)
    each = 3 * wide if shape.on_cpu else wide + compute
    return [
        MemoryRow("gathered arrays", held),
        MemoryRow("logits", each * shape.num_logits),
        MemoryRow("gradient of the head", _head_gradient(outside)),
    ]


def _at_a_block(table: ArraysPlan, shape: StepShape) -> list[MemoryRow]:
    inside = [a for a in table.arrays if a.block and a.cut.dim is not None]
    held = table.num_units - 1 if not table.reshards else 1
    trained = [array for array in inside if array.trainable]
    outside = [array for array in table.arrays if not array.block]
    return [
        MemoryRow("gathered arrays", held * sum(_whole_bytes(a, "compute") for a in inside)),
        MemoryRow("one block", shape.block_bytes),
        MemoryRow("its gradients", sum(_whole_bytes(a, "reduce") for a in trained)),
        MemoryRow("gradient of the head", _head_gradient(outside)),
    ]


def _head_gradient(outside: Sequence[ArrayPlan]) -> int:
    """Whole, until backward is done."""
    found = [_whole_bytes(a, "reduce") for a in outside if a.trainable and a.cut.dim is not None]
    return max(found, default=0)


def _whole_bytes(array: ArrayPlan, kind: str) -> int:
    return math.prod(array.padded_shape) * ITEMSIZE[getattr(array.dtypes, kind)]
