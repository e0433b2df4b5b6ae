"""Memory of a step on XLA beyond its state: the larger of two moments.

    the head        saved activations, the gathered head, logits, gradient of the head's weight
    the last block  saved activations, gradient shards, that gradient, one block and its gradients

The saved activations are read from the traced program (xla/aot.py); a cotangent reuses the
memory of its activation. `fullshard plan --exact` compiles the step and compares.

The rules for compilers were observed in their buffers. Compilers for accelerators fuse the
exponentials of the loss, and allocate the gradient shards of blocks after the logits are freed. The
CPU compiler allocates two more arrays of the size of the logits (exponentials, gradient of the
labels) and frees one of them before the gradient of the head's weight. It allocates zeros for the
blocks' gradients, and for the whole gradient of the embedding (unless the head is tied), before
everything else, and shards each gradient at once.

A head in chunks (xla/loss.py) computes gradients together with logits. It also has the sum over the
earlier chunks, which exists until the blocks' backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fullshard.planner.arrays import ArrayPlan, ArraysPlan
from fullshard.planner.memory import MemoryRow
from fullshard.planner.spec import ITEMSIZE

WIDE = 4  # bytes, at least, of the logits that the loss is computed from


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes of a device's micro-batch.

    Attributes:
        num_logits: Tokens times vocabulary, per chunk of tokens.
        kept_bytes: Bytes of activations saved for backward.
        gathered_bytes: Bytes of the blocks' gathered parameters saved for backward.
        block_bytes: Bytes that one block saves without recompute.
        accumulates: Whether gradients of several micro-batches are summed.
        on_cpu: Whether XLA compiles for the CPU.
        num_chunks: Number of chunks of the head; 0: all logits at once.
    """

    num_logits: int
    kept_bytes: int
    gathered_bytes: int
    block_bytes: int
    accumulates: bool
    on_cpu: bool
    num_chunks: int = 0


def at_peak(table: ArraysPlan, shape: StepShape) -> tuple[MemoryRow, ...]:
    """Returns memory rows of a device that add up to its peak."""
    whole = {"gradient shards", "gathered arrays"}
    always = [row for row in table.memory if row.name not in whole]
    always.append(MemoryRow("activations", shape.kept_bytes))
    if shape.accumulates:
        always.append(_gradient_shards(table.arrays, table, "sum of gradients"))
    moments = (_at_the_head(table, shape), _at_a_block(table, shape))
    return (*always, *max(moments, key=lambda rows: sum(row.num_bytes for row in rows)))


def _at_the_head(table: ArraysPlan, shape: StepShape) -> list[MemoryRow]:
    outside, blocks = _large(table, inside=False), _large(table, inside=True)
    gathered = max((a.whole_bytes("compute") for a in _parted(outside)), default=0)
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
    one = sum(a.whole_bytes("compute") for a in parted)
    gradients = _gradient_shards(table.arrays, table)
    sizes = {a.name: a.whole_bytes("reduce") for a in parted if a.trainable}
    # The loop over blocks of experts makes the gradients of all experts; see xla/experts.py.
    experts = (a for a in blocks if a.trainable and ".experts." in a.name)
    most = max([sum(a.whole_bytes("reduce") for a in experts), *sizes.values()])
    head = _largest_gradient(_parted(outside))
    return [
        *([] if shape.accumulates and not shape.on_cpu else [gradients]),
        MemoryRow("gathered arrays", one if table.reshards else shape.gathered_bytes),
        MemoryRow("one block", shape.block_bytes),
        MemoryRow("its gradients", most if shape.on_cpu else sum(sizes.values())),
        MemoryRow("gradient of the embedding" if shape.on_cpu else "gradient of the head", head),
        *[MemoryRow("gradient of the head", head)] * (shape.on_cpu and shape.num_chunks > 1),
    ]


def _large(table: ArraysPlan, *, inside: bool) -> list[ArrayPlan]:
    """The arrays of two or more dimensions inside or outside of blocks."""
    return [a for a in table.arrays if bool(a.block) == inside and len(a.shape) > 1]


def _parted(arrays: Sequence[ArrayPlan]) -> list[ArrayPlan]:
    """The sharded arrays."""
    return [array for array in arrays if array.cut.dim is not None]


def _largest_gradient(arrays: Sequence[ArrayPlan], kind: str = "reduce") -> int:
    return max((a.whole_bytes(kind) for a in arrays if a.trainable), default=0)


def _gradient_shards(
    arrays: Sequence[ArrayPlan], table: ArraysPlan, name: str = "gradient shards"
) -> MemoryRow:
    parts = (table.own_numel(a) * ITEMSIZE[a.dtypes.accumulate] for a in arrays if a.trainable)
    return MemoryRow(name, sum(parts))
