"""Version counters of the weights that forward sees.

[Note: versions]
Autograd notes the version of every tensor that it keeps for backward, and refuses one whose version
has changed. The weights that forward sees are refilled and updated behind its back, so their
counters are set here, and every wrong read is autograd's own error:

    slot may hold another unit    somewhere else, until the unit is gathered again
    shard was written             one further: graphs from before read weights that are gone, as
                                  a second backward after optimizer.step() does in one process
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fullshard.engine._torch_compat import no_guard, set_versions

Pair = tuple[nn.Parameter, torch.Tensor]  # a shard, and what forward sees of it
AWAY = 1 << 20  # writes that nobody made: the version of weights whose slot is another's


class Versions:
    """Of one unit's weights.

    Args:
        lent: Shards and compute parameters of which these are views of slots.
        own: Shards and compute parameters whose memory is always theirs.
    """

    def __init__(self, lent: Sequence[Pair] = (), own: Sequence[Pair] = ()) -> None:
        with no_guard():
            shards = [shard for shard, _ in (*lent, *own)]
            self._shards = shards if all(map(_counts, shards)) else []
            self._written = [shard._version for shard in self._shards]
        self._lent = tuple(compute for _, compute in lent)
        self._own = tuple(compute for _, compute in own)
        self._is_open = True
        self._at(tuple(compute._version for compute in (*self._lent, *self._own)))

    def mark(self, *, is_open: bool) -> None:
        """Whether autograd may read what it kept of weights in slots, or these may hold others."""
        if self._is_open is not is_open:
            self._is_open = is_open
            set_versions(self._lent, self._marks[is_open])

    def see_writes(self) -> None:
        """Refuse graphs from before the last writes into shards. Outside of the guard."""
        written = [shard._version for shard in self._shards]
        if written != self._written:
            now = (*self._marks[True], *self._of_own)
            wrote = [new != old for new, old in zip(written, self._written, strict=True)]
            self._written = written
            self._at(tuple(at + is_new for at, is_new in zip(now, wrote, strict=True)))
            set_versions(self._lent, self._marks[self._is_open])
            set_versions(self._own, self._of_own)

    def _at(self, versions: tuple[int, ...]) -> None:
        open_, self._of_own = versions[: len(self._lent)], versions[len(self._lent) :]
        self._marks = {True: open_, False: tuple(at + AWAY for at in open_)}


def _counts(shard: nn.Parameter) -> bool:
    """Whether it has a version: what was made in inference_mode has none, and takes no gradient."""
    try:
        return shard._version >= 0
    except RuntimeError:  # is_inference() does not tell once `.data` was set
        return False
