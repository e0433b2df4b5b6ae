"""Version counters of a unit's weights, by which autograd knows what was written since.

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
    """Of one unit.

    Args:
        shards: The user's parameters.
        lent: Compute parameters in slots.
        own: Compute parameters whose memory is always theirs.
    """

    def __init__(
        self,
        shards: Sequence[nn.Parameter],
        lent: Sequence[nn.Parameter],
        own: Sequence[nn.Parameter],
    ) -> None:
        with no_guard():
            self._shards = [shard for shard in shards if _counts(shard)]
        self._lent, self._own = tuple(lent), tuple(own)
        self._at = tuple(compute._version for compute in self._lent)
        self._is_open = True
        self._written: list[int] = []

    def mark(self, *, is_open: bool) -> None:
        """Let autograd read what it kept of weights in slots, or refuse it."""
        if self._is_open is not is_open:
            self._is_open = is_open
            self._place()

    def see_writes(self) -> None:
        """Refuse graphs from before the last write into a shard. Outside of the guard."""
        written = [shard._version for shard in self._shards]
        if written != self._written:
            if self._written:
                self.outdate()
            self._written = written

    def outdate(self) -> None:
        """Refuse all graphs so far."""
        self._at = tuple(at + 1 for at in self._at)
        self._place()
        set_versions(self._own, tuple(compute._version + 1 for compute in self._own))

    def _place(self) -> None:
        away = 0 if self._is_open else AWAY
        set_versions(self._lent, tuple(at + away for at in self._at))


def _counts(shard: nn.Parameter) -> bool:
    """Whether it has a version: what was made in inference_mode has none, and takes no gradient."""
    try:
        return shard._version >= 0
    except RuntimeError:  # is_inference() does not tell once `.data` was set
        return False
