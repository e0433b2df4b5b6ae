"""The persistent buffers that the plan lists, allocated once in `shard()`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from fullshard.planner.slots import Ring
from fullshard.planner.units import SlotRef
from fullshard.transport.base import torch_dtype


class Rings:
    """Slots by ring name and index: flat buffers whose addresses never change.

    Args:
        rings: What the plan lists.
        given: Slots whose memory is somebody else's, by ring.
        device: Device of all others.
        poison: Fill them with NaN.
    """

    def __init__(
        self,
        rings: Sequence[Ring],
        given: Mapping[str, list[torch.Tensor]],
        device: torch.device,
        *,
        poison: bool,
    ) -> None:
        self._buffers: dict[str, list[torch.Tensor]] = {}
        for ring in rings:
            dtype = torch_dtype(ring.dtype)
            slots = given.get(ring.name)
            if slots is None:
                make = partial(torch.zeros, ring.numel, dtype=dtype, device=device)
                slots = [make() for _ in range(ring.count)]
            if poison:
                for slot in slots:
                    slot.fill_(float("nan"))
            self._buffers[ring.name] = slots

    def view(self, ref: SlotRef, numel: int) -> torch.Tensor:
        """(numel,): a group's part of its slot."""
        return self._buffers[ref.ring][ref.index][ref.base : ref.base + numel]

    def num_bytes(self, *, gradients: bool) -> int:
        """Bytes of the rings of gradients, or of all others."""
        return sum(
            slot.nbytes
            for name, slots in self._buffers.items()
            if name.endswith(".grad") is gradients
            for slot in slots
        )
