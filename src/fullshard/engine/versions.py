"""Version counters of weights, by which autograd knows what was written since.

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

from torch import nn

from fullshard.engine._torch_compat import no_guard, set_versions

AWAY = 1 << 20  # writes that nobody made: the version of weights whose slot is another's


class Versions:
    """Of one group's weights.

    Args:
        shards: The user's parameters.
        computes: What forward sees of them.
    """

    def __init__(self, shards: Sequence[nn.Parameter], computes: Sequence[nn.Parameter]) -> None:
        with no_guard():
            self._shards = list(shards) if all(map(_counts, shards)) else []
            self._written = [shard._version for shard in self._shards]
        self._computes = tuple(computes)
        self._at = tuple(compute._version for compute in computes)
        self._away = 0

    def mark(self, *, is_open: bool) -> None:
        """Let autograd read what it kept of weights in slots, or refuse it."""
        away = 0 if is_open else AWAY
        if away != self._away:
            self._away = away
            self._place()

    def see_writes(self) -> None:
        """Refuse graphs from before the last writes into shards. Outside of the guard."""
        written = [shard._version for shard in self._shards]
        if written != self._written:
            new = [now != then for now, then in zip(written, self._written, strict=True)]
            self._at = tuple(at + is_new for at, is_new in zip(self._at, new, strict=True))
            self._written = written
            self._place()

    def _place(self) -> None:
        set_versions(self._computes, tuple(at + self._away for at in self._at))


def _counts(shard: nn.Parameter) -> bool:
    """Whether it has a version: what was made in inference_mode has none, and takes no gradient."""
    try:
        return shard._version >= 0
    except RuntimeError:  # is_inference() does not tell once `.data` was set
        return False
