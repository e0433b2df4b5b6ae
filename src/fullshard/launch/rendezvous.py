"""How the ranks meet: torch's default process group, from whoever launched this process.

our launcher   env://                                      the launcher's store
torchrun       env://                                      the agent's store
srun           TCPStore at MASTER_ADDR:MASTER_PORT         rank 0 serves it
nobody         no group at all                             one rank; fullshard needs none

The watchdog meets the other ranks at the same store, by a connection of its own.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.config.environment import LaunchEnvironment, Launcher, read_launch_environment
from fullshard.errors import ConfigError
from fullshard.observe import watchdog
from fullshard.observe.watchdog import Seat

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

TIMEOUT_MARGIN_S = 60.0  # torch's error would end a rank before all have told where they are


def init_process_group(timeout_s: float = 600.0, run_dir: Path | None = None) -> None:
    """Make the default process group: gloo on CPUs, and NCCL beside it where CUDA is visible.

    Does nothing where this process is no rank of anything.

    Args:
        timeout_s: after which a rank whose peers do not come is stuck; the watchdog then names the
            one that is missed, and torch's own error comes later.
        run_dir: the run's folder, for the watchdog's report.

    Raises:
        ConfigError: the launch cannot be used, such as more local ranks than GPUs.
    """
    import torch
    import torch.distributed as dist

    launch = read_launch_environment()
    if launch is None:
        return
    timeout = timedelta(seconds=timeout_s + TIMEOUT_MARGIN_S)
    backend, device = "gloo", None
    if torch.cuda.is_available():
        backend, device = "cpu:gloo,cuda:nccl", _cuda_device(launch)
    place: dict[str, Any] = {}
    if launch.launcher not in (Launcher.FULLSHARD, Launcher.TORCHRUN):
        store = _store(launch, timeout)
        place = {"store": store, "rank": launch.rank, "world_size": launch.world_size}
    dist.init_process_group(backend, timeout=timeout, device_id=device, **place)
    seat = Seat.of(launch, timeout_s, run_dir)
    if seat is not None:
        watchdog.start(seat)


def shutdown() -> None:
    """Destroy the process group if there is one; call it where all ranks are at their end."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _store(launch: LaunchEnvironment, timeout: timedelta) -> Store:
    from torch._C._distributed_c10d import TCPStore

    if launch.master_addr is None or launch.master_port is None:
        raise ConfigError(
            f"MASTER_PORT: expected a free port on {launch.master_addr or 'the first host'} under "
            f"{launch.launcher}, got nothing. Set MASTER_PORT to the same number for all ranks."
        )
    return TCPStore(
        launch.master_addr, launch.master_port, launch.world_size, launch.rank == 0, timeout
    )


def _cuda_device(launch: LaunchEnvironment) -> torch.device:
    import torch

    count = torch.cuda.device_count()
    if launch.local_rank >= count:
        raise ConfigError(
            f"launch.num_processes: expected at most {count} ranks on this machine, one a visible "
            f"GPU, got {launch.local_world_size}. Lower it or make more GPUs visible."
        )
    device = torch.device("cuda", launch.local_rank)
    torch.cuda.set_device(device)
    return device
