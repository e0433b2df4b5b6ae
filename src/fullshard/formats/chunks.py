"""Whole tensors out of parts: blocks of rows and columns, or ranges of a flat vector."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.checkpoint.format import natural
from fullshard.errors import CheckpointError
from fullshard.formats.pickles import PartOfTensor, attributes_of
from fullshard.formats.source import Entry


@dataclass(frozen=True, slots=True)
class Chunk:
    """A block of a tensor.

    Attributes:
        offsets: Where it begins, a number a dim.
        sizes: Its shape.
        read: Its elements.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[], torch.Tensor]


def joined(name: str, dtype: torch.dtype, shape: tuple[int, ...], chunks: Sequence[Chunk]) -> Entry:
    """A tensor made of blocks.

    Raises:
        CheckpointError: They do not fill it.
    """
    for chunk in chunks:
        pairs = zip(chunk.offsets, chunk.sizes, shape, strict=True)
        if any(natural(o) + natural(s) > size for o, s, size in pairs):
            raise CheckpointError(
                f"{name}: expected parts inside of {shape}; got {chunk.sizes} at {chunk.offsets}. "
                "Copy the files again."
            )
    there = sum(math.prod(chunk.sizes) for chunk in chunks)
    if there != math.prod(shape):
        raise CheckpointError(
            f"{name}: expected parts that make {shape}; got {there:,} of {math.prod(shape):,} "
            "elements. Name a folder that has the files of all ranks."
        )

    def read() -> torch.Tensor:
        whole, filled = torch.empty(shape, dtype=dtype), torch.zeros(shape, dtype=torch.bool)
        for chunk in chunks:
            at = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
            part = chunk.read()
            if (part.dtype, tuple(part.shape)) != (dtype, chunk.sizes) or filled[at].any():
                got = f"{part.dtype} {tuple(part.shape)}"
                raise ValueError(f"a part of {got} at {chunk.offsets}, or two there")
            whole[at], filled[at] = part, True
        return whole

    return Entry(dtype, shape, read)


def joined_ranks(name: str, parts: Sequence[Any]) -> Entry | None:
    """A tensor of which every rank saved its part; None for what is no tensor.

    Raises:
        CheckpointError: It was cut in a way that is not known here.
    """
    first = parts[0]
    if not isinstance(first, PartOfTensor):
        return Entry.of(first) if isinstance(first, torch.Tensor) else None
    shape = tuple(first.shape)
    chunks: list[Chunk] = []
    for part in parts:
        spec = attributes_of(part).get("_spec")
        if spec is None:  # ShardedTensor: its shards know where they are
            chunks += [_block(shard) for shard in part.state[0]]
            continue
        chunks += _rows(name, part, spec, chunks)
    return joined(name, first.dtype, shape, chunks)


def _block(shard: Any) -> Chunk:
    facts = attributes_of(shard)
    where = attributes_of(facts["metadata"])
    return Chunk(
        tuple(where["shard_offsets"]), tuple(where["shard_sizes"]), lambda: facts["tensor"]
    )


def _rows(name: str, part: Any, spec: Any, before: Sequence[Chunk]) -> list[Chunk]:
    """What a rank adds of a DTensor: the next rows, until the tensor is whole.

    On a mesh (replicate, shard) the first ranks make it whole; the others have the same again.
    """
    local: torch.Tensor = attributes_of(part)["_local_tensor"]
    placements = attributes_of(spec)["placements"]
    kinds = [type(placement).__name__ for placement in placements]
    cut = [placement for placement in placements if type(placement).__name__ == "Shard"]
    if len(cut) > 1 or set(kinds) - {"Shard", "Replicate"} or (cut and kinds[-1] != "Shard"):
        raise CheckpointError(
            f"{name}: expected DTensors cut over one axis, the last; got {', '.join(kinds)}. "
            "Save it with torch.distributed.checkpoint, which can be imported."
        )
    shape = tuple(part.shape)
    if not cut:
        return [] if before else [Chunk((0,) * len(shape), shape, lambda: local)]
    dim: int = (attributes_of(cut[0]) or {"dim": 0})["dim"]
    begin = sum(chunk.sizes[dim] for chunk in before)
    if begin == shape[dim] or local.shape[dim] == 0:
        return []
    offsets = tuple(begin if at == dim else 0 for at in range(len(shape)))
    return [Chunk(offsets, tuple(local.shape), lambda: local)]


def flat(name: str, parts: Sequence[torch.Tensor], start: int, shape: tuple[int, ...]) -> Entry:
    """Elements from `start` on of a vector that lies in several parts.

    Raises:
        CheckpointError: The vector ends before.
    """
    stop, pieces, begin = start + math.prod(shape), list[torch.Tensor](), 0
    for part in parts:
        end = begin + part.numel()
        if begin < stop and end > start:
            pieces.append(part[max(start - begin, 0) : stop - begin])
        begin = end
    if sum(piece.numel() for piece in pieces) != stop - start:
        raise CheckpointError(
            f"{name}: expected elements up to {stop:,}; the files of all ranks have {begin:,}. "
            "Name a folder that has the files of all ranks."
        )
    dtype = parts[0].dtype if parts else torch.float32
    return Entry(
        dtype, shape, lambda: torch.cat(pieces).view(shape) if pieces else torch.empty(shape)
    )
