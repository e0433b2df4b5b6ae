"""The place of each parameter in its unit's flat buffer, and the part that every rank owns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

Bounds = tuple[tuple[int, int], ...]  # [offset, stop) of each parameter in a flat buffer

ALIGNMENT = 64  # elements: a cache line of AVX-512, and above NCCL's 16 bytes for every dtype

_WRAPPERS = {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"}  # of module names


def clean_name(name: str) -> str:
    """Returns the name of a parameter or module without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@dataclass(frozen=True, slots=True)
class Slice:
    """`[start, stop)` of one parameter's elements in row-major order.

    Attributes:
        name: The parameter's first name.
        shape: The parameter's global shape.
        start: First element.
        stop: One past the last element; equal to `start` if the rank has no element.
        offset: Beginning of the range in the rank's shard of the flat buffer, in elements.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


def align(numel: int, multiple: int) -> int:
    """Rounds up to a multiple."""
    return -(-numel // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Placement:
    """One parameter in the flat buffer: `[offset, offset + numel)`.

    Attributes:
        name: The parameter's first name.
        shape: Shape of its part after other axes of the mesh cut it.
        offset: Its first element in the buffer.
        atom: Number of consecutive elements that are never split between ranks. It is 1 today;
            block-quantised or row-wise states will need more.
        parts: Number of different parts that other axes cut it into.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    atom: int = 1
    parts: int = field(default=1, metadata={"omitted": 1})

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape over all axes, if its parts are equal rows; else one with as many elements."""
        return self.shape if self.parts == 1 else (self.parts * self.shape[0], *self.shape[1:])

    @property
    def stop(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """A flat buffer cut into equal parts; a part may begin and end inside a parameter.

        offset   0            128      192                    384 = numel
                 | P0 (100)   | P1 (3) | P2 (150)      | pad  |
        2 parts  |<------- rank 0 ------->|<------ rank 1 --->|
                 0                       192                 384

    Every offset is a multiple of 64 elements, the length a multiple of `num_parts` x 64.
    Padding is between parameters and at the end, and is always zero.
    """

    placements: tuple[Placement, ...]
    numel: int
    num_parts: int

    def __post_init__(self) -> None:
        assert self.num_parts >= 1, self.num_parts
        assert self.numel % (self.num_parts * ALIGNMENT) == 0, (self.numel, self.num_parts)
        end, last = 0, ""
        for placement in self.placements:
            assert placement.offset % ALIGNMENT == 0, placement
            assert placement.offset >= end, f"{placement.name} overlaps {last}"
            end, last = placement.stop, placement.name
        assert end <= self.numel, f"{last} ends at {end}, after the buffer's {self.numel}"

    @classmethod
    def build(
        cls, params: Sequence[tuple[str, tuple[int, ...], int]], num_parts: int
    ) -> FlatLayout:
        """Places parameters, each (name, shape, `Placement.parts`), one after another."""
        placements: list[Placement] = []
        offset = 0
        for name, shape, parts in params:
            placements.append(Placement(name, shape, offset, parts=parts))
            offset += align(math.prod(shape), ALIGNMENT)
        return cls(tuple(placements), align(offset, num_parts * ALIGNMENT), num_parts)

    @property
    def part_numel(self) -> int:
        """Elements in one rank's part."""
        return self.numel // self.num_parts

    @property
    def padding(self) -> int:
        """Elements that belong to no parameter."""
        return self.numel - sum(placement.numel for placement in self.placements)

    @property
    def bounds(self) -> Bounds:
        """`[offset, stop)` of each parameter."""
        return tuple((p.offset, p.stop) for p in self.placements)

    def holders(self, placement: Placement) -> list[tuple[int, int, int]]:
        """Returns (part, start, stop) for every part with elements of a parameter."""
        first = placement.offset
        found = _parts_with(first, placement.stop, self.part_numel)
        return [(part, start - first, stop - first) for part, start, stop in found]

    def slices(self, part: int) -> tuple[Slice, ...]:
        """Returns one slice per parameter in order; a slice may be empty."""
        low = part * self.part_numel
        high = low + self.part_numel
        found: list[Slice] = []
        for p in self.placements:
            start, stop = max(p.offset, low), min(p.stop, high)
            ends = (start - p.offset, stop - p.offset, start - low) if start < stop else (0, 0, 0)
            found.append(Slice(p.name, p.shape, *ends))
        return tuple(found)


def _parts_with(start: int, stop: int, part_numel: int) -> Iterator[tuple[int, int, int]]:
    """(part, first, one past the last) for every part with elements of [start, stop)."""
    for part in range(start // part_numel, -(-stop // part_numel)) if start < stop else ():
        low = part * part_numel
        yield part, max(start, low), min(stop, low + part_numel)


@cache
def owned_numels(bounds: Bounds, num_parts: int, part_numel: int) -> tuple[int, ...]:
    """Returns the elements of parameters in each part of a flat buffer, without padding."""
    found = [0] * num_parts
    for bound in bounds:
        for part, start, stop in _parts_with(*bound, part_numel):
            found[part] += stop - start
    return tuple(found)
