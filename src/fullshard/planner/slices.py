"""The record "this range of this parameter", which planner, engine and checkpoints share."""

from __future__ import annotations

from dataclasses import dataclass

_WRAPPERS = {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"}


def clean_name(name: str) -> str:
    """A parameter's or module's name as users know it, without what wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@dataclass(frozen=True, slots=True)
class Slice:
    """`[start, stop)` of one parameter's elements in row-major order.

    Attributes:
        name: The parameter's first name.
        shape: The parameter's global shape.
        start: First element.
        stop: One past the last element; equal to `start` where the rank holds none of it.
        offset: Where the range begins in the rank's shard of the flat buffer, in elements.
        atom: Elements that are never parted between ranks (1: none; block-quantised or row-wise
            states will ask for more).
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int
    atom: int = 1

    @property
    def numel(self) -> int:
        return self.stop - self.start
