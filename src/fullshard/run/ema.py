"""An exponential moving average of sharded weights.

It lies in the optimizer's state, under its own name beside the moments: so it is sharded, saved,
cut anew for other ranks and loaded as they are.

References:
    Polyak and Juditsky, Acceleration of stochastic approximation by averaging, 1992; with constant
    decay as in Tarvainen and Valpola, https://arxiv.org/abs/1703.01780.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager

import torch

from fullshard.checkpoint.format import AVERAGE


class Average:
    """The average of what an optimizer trains.

    Args:
        optimizer: Optimizer of the sharded model.
        decay: Weight of the past in [0, 1).
    """

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float) -> None:
        self._optimizer = optimizer
        self._decay = decay

    @torch.no_grad()
    def update(self) -> None:
        """After an update of the weights, while they have their gradients.

        A weight's average begins with its first update. Before that the optimizer has no state of
        it, and must find none: it makes its own where there is nothing.
        """
        for param, state in self._states():
            if AVERAGE in state:
                state[AVERAGE].lerp_(param, 1.0 - self._decay)
            elif param.grad is not None:
                state[AVERAGE] = torch.zeros_like(param).copy_(param)  # lives where states do

    @contextmanager
    def applied(self) -> Generator[None]:
        """The average in place of the weights, for a while."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for param, state in self._states():
            if AVERAGE in state:
                kept = param.detach().clone()
                param.copy_(state[AVERAGE])
                state[AVERAGE].copy_(kept)

    @staticmethod
    def forget(optimizer: torch.optim.Optimizer) -> bool:
        """Drops what a checkpoint has of an average that this run does not keep."""
        found = [state.pop(AVERAGE, None) is not None for state in optimizer.state.values()]
        return any(found)

    def _states(self) -> Iterable[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                yield param, self._optimizer.state[param]
