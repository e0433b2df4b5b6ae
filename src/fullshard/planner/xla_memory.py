"""What a step on XLA holds beside its state: activations of a decoder, counted from shapes.

XLA lays temporaries out itself, so this is an estimate (`fullshard plan --exact` asks XLA). What
backward needs of a block is what its policy keeps:

    none        norms, rotated heads, scores, the parts of the mlp
    selective   the outputs of products
    block       the block's input

and at once either the logits and the head's gradient, or all of one block and its gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

from fullshard.config.values import RecomputeKind
from fullshard.planner.arrays import ArraysPlan
from fullshard.planner.memory import MemoryRow
from fullshard.planner.spec import ITEMSIZE

WIDE = 4  # bytes, at least, of norms, scores and logits


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Widths of a decoder, and a device's batch of one micro-batch.

    Attributes:
        width: Of the residual stream.
        query_width, kv_width: Of all query heads together, and of all key (or value) heads.
        mlp_width: Inner width of the gated mlp.
        num_heads: Of queries.
        vocab_size: Columns of the logits.
        num_samples, num_tokens: Samples, and tokens of each.
    """

    width: int
    query_width: int
    kv_width: int
    mlp_width: int
    num_heads: int
    vocab_size: int
    num_samples: int
    num_tokens: int


def temporaries(table: ArraysPlan, shape: DecoderShape) -> tuple[MemoryRow, ...]:
    """Rows beside those of the state, of a device."""
    compute = max(ITEMSIZE[array.dtypes.compute] for array in table.arrays)
    wide = max(compute, WIDE)
    tokens = shape.num_samples * shape.num_tokens
    layers = max(array.num_layers for array in table.arrays)
    full, products, entry = _kept_bytes(shape, compute, wide)
    every = min(table.recompute.every, layers)
    match table.recompute.kind:
        case RecomputeKind.NONE:
            kept = layers * full
        case RecomputeKind.SELECTIVE:
            kept = layers * products
        case RecomputeKind.BLOCK:
            cheap = -(-layers // every)
            kept = cheap * entry + (layers - cheap) * full
        case RecomputeKind.OFFLOAD:
            kept = entry  # the others' inputs wait on the host
    logits = (wide + compute) * shape.vocab_size
    head, block = _unreduced_bytes(table)
    working = max(tokens * logits + head, tokens * full + block)
    return (MemoryRow("activations", tokens * kept), MemoryRow("head or one block", working))


def _kept_bytes(shape: DecoderShape, compute: int, wide: int) -> tuple[int, int, int]:
    """Bytes a token of one block: all that backward needs, products' outputs alone, its input."""
    entry = shape.width * compute
    heads = (2 * shape.query_width + 2 * shape.kv_width) * compute
    scores = shape.num_heads * shape.num_tokens * (wide + (compute if compute < wide else 0))
    norms = 2 * shape.width * (wide + compute)
    mlp = 4 * shape.mlp_width * compute
    products = shape.query_width + 2 * shape.kv_width + 2 * shape.width + 2 * shape.mlp_width
    return 2 * entry + heads + scores + norms + mlp, products * compute + entry, entry


def _unreduced_bytes(table: ArraysPlan) -> tuple[int, int]:
    """Whole gradients at once: of the largest array outside of blocks, and of one block."""
    outside, inside = [0], [0]
    for array in table.arrays:
        if array.trainable and array.cut.dim is not None:
            num_bytes = array.numel // (array.num_layers or 1) * ITEMSIZE[array.dtypes.reduce]
            (inside if array.block else outside).append(num_bytes)
    return max(outside), sum(inside)
