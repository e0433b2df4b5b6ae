"""Process groups, made once for each layout of ranks and shared by the models that have it.

A gloo group costs threads and sockets, a NCCL group hundreds of megabytes, and shutting one down
while a rank still uses it ends that rank. So they live as long as the default process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fullshard.engine._torch_compat import is_alive

TAGS_A_MODEL = 8


@dataclass
class _Made:
    """What was made beside one default process group."""

    groups: dict[Any, list[Any]] = field(default_factory=dict)
    serials: count[int] = field(default_factory=lambda: count(1))


_MADE: WeakKeyDictionary[Any, _Made] = WeakKeyDictionary()  # by default process group


def own_group(purpose: str, layout: Sequence[Sequence[int]], index: int) -> Any:
    """The group of this layout that this rank is in; None where it would be alone.

    A collective the first time: every rank makes every group, in the same order.

    Args:
        purpose: Groups of different purposes do not wait for each other.
        layout: The ranks of each group.
        index: Which of them is this rank's.
    """
    if len(layout[0]) == 1:
        return None
    groups = _made().groups
    key = (purpose, tuple(map(tuple, layout)))
    found = groups.get(key)
    if found is None or not is_alive(found[index]):
        found = groups[key] = [dist.new_group(list(ranks)) for ranks in layout]
    return found[index]


def first_tag() -> int:
    """Where a new model's message tags begin: the same on all ranks, which shard in one order."""
    return TAGS_A_MODEL * next(_made().serials)


def _made() -> _Made:
    return _MADE.setdefault(dist.group.WORLD, _Made())
