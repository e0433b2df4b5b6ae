"""Where each kind of state is stored between steps."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Place(StrEnum):
    """A kind of memory; `shared` is one mapping for all ranks of a host."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    SHARED = "shared"


@dataclass(frozen=True, slots=True)
class Homes:
    """Where each kind of state is stored; gathered units are always on the device."""

    parameters: Place = Place.DEVICE
    gradients: Place = Place.DEVICE
    optimizer: Place = Place.DEVICE

    @property
    def offloads(self) -> bool:
        """Whether parameters are copied to the device before every gather."""
        return self.parameters in (Place.HOST, Place.DISK)


DEFAULT_HOMES = Homes()
