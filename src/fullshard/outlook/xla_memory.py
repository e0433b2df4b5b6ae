"""What a step on XLA holds beside its state, at the fuller of two moments.

    the head       what forward kept, the gathered head, logits, the gradient of its weight
    the last block what forward kept, gradient shards, that gradient, one block with its gradients

What forward kept is read off the traced program (xla/aot.py); a cotangent takes the place of
the activation that made it. `fullshard plan --exact` asks XLA, and compares.

Compilers differ, in what was seen in their buffers. Those of accelerators fuse the exponentials of
the loss and make gradient shards of blocks when logits are gone. CPU's keeps two more arrays of the
size of the logits (exponentials; the label's gradient), of which one is gone when the gradient of
the head's weight is made. The zeros that gradients are written into (of the blocks' loop, and the
whole of the embedding's, unless it is added to that of a tied head) it makes before anything else,
and each gradient it cuts at once.

A head in chunks (xla/head.py) makes gradients as it makes logits. Beside those of a chunk there is
the sum of the chunks before, which backward still has when it comes to the blocks.
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
        num_logits: Tokens times vocabulary, of a chunk of tokens.
        kept_bytes: Bytes of activations that forward keeps for backward.
        gathered_bytes: Bytes of the blocks' parameters that it keeps whole.
        block_bytes: That one block keeps where nothing is computed anew.
        accumulates: Whether there are several micro-batches: their sum is there all the time.
        on_cpu: Whose compiler it is.
        num_chunks: Chunks of tokens that the head's gradient is a sum over; 0: all logits at once.
    """

    num_logits: int
    kept_bytes: int
    gathered_bytes: int
    block_bytes: int
    accumulates: bool
    on_cpu: bool
    num_chunks: int = 0


def at_peak(table: ArraysPlan, shape: StepShape) -> tuple[MemoryRow, ...]:
    """Rows of a device, which add up to its peak."""
    whole = {"gradient shards", "gathered arrays"}
    always = [row for row in table.memory if row.name not in whole]
    always.append(MemoryRow("activations", shape.kept_bytes))
    if shape.accumulates:
        always.append(_gradient_shards(table.arrays, table, "sum of gradients"))
    moments = (_at_the_head(table, shape), _at_a_block(table, shape))
    return (*always, *max(moments, key=lambda rows: sum(row.num_bytes for row in rows)))


def _at_the_head(table: ArraysPlan, shape: StepShape) -> list[MemoryRow]:
    outside, blocks = _large(table, inside=False), _large(table, inside=True)
    gathered = max((_whole_bytes(a, "compute") for a in _parted(outside)), default=0)
    gradient = _largest_gradient(outside)
    of_chunk = _largest_gradient(outside, "compute") if shape.num_chunks > 1 else 0
    compute = max(ITEMSIZE[array.dtypes.compute] for array in table.arrays)
    wide = max(compute, WIDE)
    one = wide * shape.num_logits
    rows = [MemoryRow("gathered arrays", gathered + shape.gathered_bytes)]
    if shape.on_cpu:
        return [
            *rows,
            _gradient_shards(blocks, table),
            MemoryRow("gradient of the embedding", gradient * (len(outside) > 1)),
            MemoryRow("logits", one if shape.num_chunks else 2 * one),
            MemoryRow("gradient of the head", max(one, gradient) + of_chunk),
        ]
    logits = (wide + compute) * shape.num_logits
    return [
        *rows,
        MemoryRow("logits", logits),
        MemoryRow("gradient of the head", gradient + of_chunk),
    ]


def _at_a_block(table: ArraysPlan, shape: StepShape) -> list[MemoryRow]:
    outside, blocks = _large(table, inside=False), _large(table, inside=True)
    parted = _parted(blocks)
    one = sum(_whole_bytes(a, "compute") for a in parted)
    gradients = _gradient_shards(table.arrays, table)
    sizes = [_whole_bytes(a, "reduce") for a in parted if a.trainable]
    head = _largest_gradient(_parted(outside))
    return [
        *([] if shape.accumulates and not shape.on_cpu else [gradients]),
        MemoryRow("gathered arrays", one if table.reshards else shape.gathered_bytes),
        MemoryRow("one block", shape.block_bytes),
        MemoryRow("its gradients", max(sizes, default=0) if shape.on_cpu else sum(sizes)),
        MemoryRow("gradient of the embedding" if shape.on_cpu else "gradient of the head", head),
        *(
            [MemoryRow("gradient of the head", head)]
            if shape.on_cpu and shape.num_chunks > 1
            else []
        ),
    ]


def _large(table: ArraysPlan, *, inside: bool) -> list[ArrayPlan]:
    """The arrays of several dimensions in blocks, or outside of them."""
    return [a for a in table.arrays if bool(a.block) == inside and len(a.shape) > 1]


def _parted(arrays: Sequence[ArrayPlan]) -> list[ArrayPlan]:
    """Those that are gathered and scattered; of the others a device has its own whole."""
    return [array for array in arrays if array.cut.dim is not None]


def _largest_gradient(arrays: Sequence[ArrayPlan], kind: str = "reduce") -> int:
    return max((_whole_bytes(a, kind) for a in arrays if a.trainable), default=0)


def _gradient_shards(
    arrays: Sequence[ArrayPlan], table: ArraysPlan, name: str = "gradient shards"
) -> MemoryRow:
    parts = (
        a.part_numel(table.mesh.shard) * ITEMSIZE[a.dtypes.accumulate]
        for a in arrays
        if a.trainable
    )
    return MemoryRow(name, sum(parts))


def _whole_bytes(array: ArrayPlan, kind: str) -> int:
    return math.prod(array.padded_shape) * ITEMSIZE[getattr(array.dtypes, kind)]
