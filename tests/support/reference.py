"""One process runs the ranks' batches one after another; imports nothing of fullshard.

The ranks' local losses are separate, because the loss of one joined batch differs by 1e-6 for a
model with float32 layers, which is no fault of sharding.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

MAX_NORM = 0.25
NUM_STEPS = 3
TOLERANCE = 1e-12

Work = Callable[[nn.Module, int, int], torch.Tensor]  # forward and backward of (step, rank): loss


@dataclass(frozen=True)
class Step:
    """Results of a step.

    Attributes:
        losses: Losses of this process, one per simulated rank.
        gradients: Full gradients by parameter name, before clipping; None if autograd set none.
        norm: The norm before clipping.
        params: Full parameters after the update.
    """

    losses: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    norm: torch.Tensor
    params: dict[str, torch.Tensor]


def make_optimizer(kind: str, params: object) -> torch.optim.Optimizer:
    """SGD, AdamW or Adafactor with settings under which every gradient matters.

    AdamW's eps is large. An update divides the gradient by the root of its square. With the usual
    1e-8, rounding noise in gradients that should be zero (a bias before a norm) moves weights.
    """
    if kind == "sgd":
        return torch.optim.SGD(params, lr=0.2, momentum=0.9, weight_decay=0.01)
    if kind == "adafactor":
        return torch.optim.Adafactor(params, lr=1e-2, weight_decay=0.1)
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-4, weight_decay=0.1)


def train_alone(
    build: Callable[[], nn.Module],
    work: Work,
    *,
    world_size: int,
    kind: str = "sgd",
    num_steps: int = NUM_STEPS,
) -> list[Step]:
    """Trains in this process as `world_size` ranks would.

    Args:
        build: Makes the model.
        work: Forward and backward of one rank's batch in one step.
        world_size: Number of simulated ranks.
        kind: "sgd", "adamw" or "adafactor".
        num_steps: Updates.
    """
    model = build()
    optimizer = make_optimizer(kind, model.parameters())
    steps = []
    for step in range(num_steps):
        losses = [work(model, step, rank) for rank in range(world_size)]
        for param in model.parameters():
            if param.grad is not None:
                param.grad /= world_size
        gradients = {n: copy_of(p.grad) for n, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        params = {name: param.detach().clone() for name, param in model.named_parameters()}
        steps.append(Step(losses, gradients, norm, params))
    return steps


def copy_of(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Copies a gradient, so that the next step does not change it."""
    return None if gradient is None else gradient.detach().clone()


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, relative to the largest element where that is above one; NaN counts
    as infinite."""
    if found.shape != wanted.shape:
        return float("inf")
    if not wanted.numel():
        return 0.0
    scale = max(1.0, float(wanted.abs().max()))
    worst = float((found.to(torch.float64) - wanted.to(torch.float64)).abs().max()) / scale
    return worst if worst == worst else float("inf")
