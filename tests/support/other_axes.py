"""A model that torch parallelizes over a tensor axis, with sizes that do not divide."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from support.models import perturbed

WIDTH, LENGTH = 12, 8


def mesh_of(replicate: int = 1, shard: int = 2, tensor: int = 2) -> DeviceMesh:
    names = ("replicate", "shard", "tensor")
    return init_device_mesh("cpu", (replicate, shard, tensor), mesh_dim_names=names)


class Block(nn.Module):
    """A norm on a part of the sequence, and two layers that are cut; sizes that do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 3)
        self.down = nn.Linear(2 * WIDTH + 3, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net() -> nn.Module:
    torch.manual_seed(0)
    return perturbed(Net().double())


def cut_net(model: nn.Module, mesh: DeviceMesh) -> None:
    sequence = Shard(1)
    for block in model.blocks:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=sequence, use_local_output=False),
            "down": RowwiseParallel(output_layouts=sequence),
        }
        parallelize_module(block, mesh, plan)
    ends = {
        "blocks.0": PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=sequence, use_local_output=True
        ),
        "head": ColwiseParallel(input_layouts=sequence, output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)
