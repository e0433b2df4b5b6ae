"""The memory of a model's state on this rank: device, host or disk.

Place          a word of the plan: device, host, disk or shared    planner/units.py
Homes          the plan's place of each kind of state              planner/units.py
Residence      the memory that a place is on this rank             here
DeviceHomes    the residence of each kind of state                 here
Home           when masters and gradient slots may be written      transport/base.py
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import tempfile
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from fullshard.config.sharding import Offload
from fullshard.engine.disk import Disk
from fullshard.errors import OutOfMemoryError, UnsupportedModelError
from fullshard.planner.units import Homes, Place


@dataclass(frozen=True)
class Residence:
    """The memory in which one kind of state is allocated.

    Attributes:
        device: The device of the tensors.
        locks_for: The device that reads the page-locked host memory; None: it is not locked.
        disk: The model's files; None for memory.
        kind: Kind of state; on disk, each kind has its own files.
    """

    device: torch.device
    locks_for: torch.device | None = None
    disk: Disk | None = None
    kind: str = ""

    @classmethod
    def of(
        cls, place: Place, device: torch.device, disk: Disk | None = None, kind: str = ""
    ) -> Residence:
        """Returns the residence for a place of the plan and a compute device."""
        if place in (Place.DEVICE, Place.SHARED):
            return cls(device)
        host = torch.device("cpu")
        if place is Place.DISK:
            return cls(host, disk=disk, kind=kind)
        return cls(host, device if device.type == "cuda" else None)

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocates (numel,) zeros.

        Raises:
            ConfigError: The folder is not there, not to be written, or its disk is full.
        """
        if self.disk is not None:
            return self.disk.zeros(numel, dtype, self.kind)
        if self.locks_for is not None and numel:
            locked = _PageLocked(numel * dtype.itemsize, self.locks_for)
            return torch.frombuffer(locked, dtype=dtype)
        return torch.zeros(numel, dtype=dtype, device=self.device)


@dataclass(frozen=True)
class DeviceHomes:
    """The residence of each kind of state.

    Attributes:
        device: The compute device, which also has the slots.
        parameters: Residence of the masters.
        gradients: Residence of the reduced gradients.
        states: Residence of optimizer states; None: the parameters' device.
        offloads_gradients: Whether reductions are first received in a device buffer. CPU offload on
            a CPU device takes the same path.
        disk: All state on disk.
    """

    device: torch.device
    parameters: Residence
    gradients: Residence
    states: Residence | None
    offloads_gradients: bool
    disk: Disk | None = None

    @classmethod
    def of(cls, homes: Homes, device: torch.device, offload: Offload | None) -> DeviceHomes:
        """Returns the residences of the plan's places for a compute device."""
        places = (homes.parameters, homes.gradients, homes.optimizer)
        if Place.HOST in places or Place.DISK in places:
            return_large_blocks()
        disk = None
        if Place.DISK in places:
            disk = Disk((offload and offload.folder) or tempfile.gettempdir())
        kinds = ("parameters", "gradients", "states")
        pairs = zip(places, kinds, strict=True)
        parameters, gradients, states = (Residence.of(p, device, disk, k) for p, k in pairs)
        return cls(
            device,
            parameters,
            gradients,
            states if homes.optimizer is Place.DISK else None,
            offloads_gradients=homes.gradients is not Place.DEVICE,
            disk=disk,
        )


class _PageLocked(mmap.mmap):
    """Page-locked zeros of this size; torch's allocator would round up to a power of two.

    A tensor in this memory keeps it alive. Like CUDA's own host memory, it does not exist in forked
    processes.

    Args:
        nbytes: Size of the memory.
        device: The device whose copies may still read the memory when its last tensor is deleted,
            by any thread, each of which has a current device of its own.

    Raises:
        OutOfMemoryError: CUDA cannot lock so many bytes.
    """

    address = 0  # of the locked memory
    device: torch.device

    def __new__(cls, nbytes: int, device: torch.device) -> Self:
        made = super().__new__(cls, -1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        made.madvise(mmap.MADV_DONTFORK)
        address = torch.frombuffer(made, dtype=torch.uint8).data_ptr()
        cuda: Any = torch.cuda.cudart()
        failed = int(cuda.cudaHostRegister(address, nbytes, 1))  # for all devices
        if failed:
            raise OutOfMemoryError(
                f"offload: expected {nbytes:,} bytes of page-locked host memory; "
                f"cudaHostRegister returned {failed}. Use more ranks or hosts, or offload to nvme."
            )
        made.address, made.device = address, device
        return made

    def __del__(self) -> None:
        if self.address:
            torch.cuda.synchronize(self.device)
            cuda: Any = torch.cuda.cudart()
            cuda.cudaHostUnregister(self.address)


def return_large_blocks() -> None:
    """Let malloc return every freed block of 1 MiB or more to the kernel.

    Otherwise glibc raises this threshold up to 32 MiB, to the largest block that was freed. Smaller
    blocks then come from the heap, where an aligned block does not fit into the hole that a block
    of its size left. The heap grew to 1,146 MiB while tensors and modules took 609 MiB.
    """
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD


def compute_device(model: nn.Module) -> torch.device:
    """The device of the model's parameters; for meta, the accelerator if there is one.

    Raises:
        UnsupportedModelError: The parameters are on several devices.
    """
    devices: dict[torch.device, str] = {}
    for name, param in model.named_parameters():
        if not param.is_meta:
            devices.setdefault(param.device, name)
    if len(devices) > 1:
        (one, first), (other, second), *_ = devices.items()
        raise UnsupportedModelError(
            f"{second}: expected all parameters on one device; it is on {other}, {first} on {one}. "
            "Move the model before fs.shard."
        )
    on_meta = next((name for name, param in model.named_parameters() if param.is_meta), None)
    if devices and on_meta is not None:
        raise UnsupportedModelError(
            f"{on_meta}: expected all parameters on meta, or none; this one is, and "
            f"{next(iter(devices.values()))} is on {next(iter(devices))}. Materialize both, or "
            "build the whole model under torch.device('meta')."
        )
    return next(iter(devices)) if devices else default_device()


def default_device() -> torch.device:
    """The accelerator if there is one: that of the process group, or the current one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    group = dist.group.WORLD if dist.is_initialized() else None
    bound = getattr(group, "bound_device_id", None)  # `device_id` of init_process_group
    return bound or torch.device("cuda", torch.cuda.current_device())
