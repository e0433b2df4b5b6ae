"""A chain of layers on which users' programs run, and the errors of its sharded form."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fullshard as fs
from fullshard.errors import EngineError, ShardedTensorError
from support.models import perturbed

WIDTH = 6
SETTINGS: dict[str, dict[str, Any]] = {
    "c10d": {"transport": "c10d"},
    "direct": {"transport": "direct"},
    "shared": {"transport": "shared"},
    "no_shard": {"strategy": "no_shard"},
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Chain(nn.Module):
    """Layers that are units, between a stem and a head."""

    wrap = ("Layer",)
    is_backwards = False  # its first step learns an order of units that differs from the plan's

    def __init__(self, layer: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(4))
        self.wrap = (type(self.layers[0]).__name__,)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in reversed(self.layers) if self.is_backwards else self.layers:
            x = layer(x)
        return self.head(x)


def made(build: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return perturbed(build().double())


def batch(rank: int, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(5, WIDTH, generator=generator, dtype=torch.float64)


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def said_of(build: Callable[[], nn.Module], work: Callable[[Any, torch.Tensor], Any]) -> list[str]:
    """Returns the errors of a program on this rank's batch, under each of SETTINGS."""
    said = []
    for settings in SETTINGS.values():
        model = made(build)
        fs.shard(model, wrap=model.wrap, poison=True, **settings)
        try:
            work(model, batch(dist.get_rank()))
            said.append("nothing")
        except (EngineError, ShardedTensorError) as error:
            said.append(str(error))
    return said
