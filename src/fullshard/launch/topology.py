"""How many ranks a configuration asks for, and how many of them are on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fullshard.planner.mesh import Topology

if TYPE_CHECKING:
    from fullshard.config.schema import LaunchConfig

DEFAULT_PROCESSES = 2  # where there is no accelerator: enough to shard anything at all


def configured_topology(launch: LaunchConfig) -> Topology:
    """The ranks of `launch`: num_processes counts those of all machines, as Accelerate does.

    Left out, it is one rank for each accelerator that is visible here, on every machine, else 2.
    """
    machines = launch.num_machines
    world = launch.num_processes or num_visible_accelerators() * machines or DEFAULT_PROCESSES
    return Topology(world, world // machines if world % machines == 0 else None)


def num_visible_accelerators() -> int:
    """GPUs that this process may use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
