"""A small model, its batches, and the results of one process, for scripts of other tools."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

TOLERANCE = 2e-6  # float32, different order of sums
STEPS = 4
MAX_NORM = 0.5
LR = 1e-2


class TransformerBlock(nn.Module):
    """A residual block with a common class name."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, three blocks and a head; a buffer."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 16)
        self.layers = nn.ModuleList(TransformerBlock() for _ in range(3))
        self.head = nn.Linear(16, 13, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.full((16,), 0.1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) + self.shift
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def build(**arguments: Any) -> Net:
    """Builds equal models everywhere."""
    torch.manual_seed(0)
    return Net(**arguments)


def batch(step: int, rank: int) -> torch.Tensor:
    """Returns one rank's tokens of one step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 13, (4, 7), generator=generator)


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Returns the next-token loss of one rank's batch."""
    tokens = batch(step, rank)
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Returns the optimizer of both sides."""
    return torch.optim.AdamW(model.parameters(), lr=LR)


def train_alone(
    model: nn.Module, *, steps: int = STEPS, optimizer: Any = None, first: int = 0
) -> list[list[float]]:
    """Trains one process on all ranks' batches; returns each step's losses by rank."""
    optimizer = optimizer or adamw(model)
    found = []
    world = dist.get_world_size()
    for step in range(first, first + steps):
        losses = [loss_of(model, step, rank) for rank in range(world)]
        (sum(losses) / world).backward()
        found.append([float(loss.detach()) for loss in losses])
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return found


Clip = Callable[[nn.Module], Any]


def train(
    model: nn.Module,
    *,
    steps: int = STEPS,
    optimizer: Any = None,
    clip: Clip | None = None,
    first: int = 0,
) -> list[float]:
    """Returns this rank's losses; `clip` defaults to torch's clipping."""
    optimizer = optimizer or adamw(model)
    found = []
    for step in range(first, first + steps):
        loss = loss_of(model, step, dist.get_rank())
        loss.backward()
        found.append(float(loss.detach()))
        if clip is None:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        else:
            clip(model)
        optimizer.step()
        optimizer.zero_grad()
    return found


def assert_trains_as_one(
    wrap: Callable[[nn.Module], nn.Module],
    *,
    tolerance: float = TOLERANCE,
    clip: Clip | None = None,
    **arguments: Any,
) -> nn.Module:
    """Checks a wrapped model's losses against one process; returns the wrapped model."""
    wanted = [losses[dist.get_rank()] for losses in train_alone(build(**arguments))]
    model = wrap(build(**arguments))
    found = train(model, clip=clip)
    worst = max(abs(a - b) for a, b in zip(found, wanted, strict=True))
    assert worst <= tolerance, (worst, found, wanted)
    return model


def assert_same_state(found: dict[str, Any], wanted: dict[str, Any], tolerance: float = 1e-5):
    """Compares names and values of two full state dicts."""
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].shape == value.shape, name
        worst = (found[name].double() - value.double()).abs().max()
        assert worst <= tolerance, (name, worst)
