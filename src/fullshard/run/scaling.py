"""The loss scaler of fp16 compute: torch's own, asked in the loop's order.

fp16 has no numbers below 6e-8, so losses are multiplied before backward and gradients divided after
it. An infinity on one rank is every rank's (the guard of the gradients shares it), so all ranks
skip the same step and halve the factor together.
"""

from __future__ import annotations

import torch

from fullshard.errors import DivergedError

SMALLEST = 2.0**-14  # of the factor: what overflows even then is no matter of range


class LossScaler:
    """Scales losses, and steps where no gradient overflowed.

    Args:
        optimizer: Optimizer of the sharded model.
        device: That computes.
        enabled: False leaves everything as it is.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, device: torch.device, *, enabled: bool
    ) -> None:
        self._optimizer = optimizer
        self._scaler = torch.amp.GradScaler(device.type, enabled=enabled)
        self.enabled = enabled

    def state_dict(self) -> dict[str, float]:
        """The factor and how long it has held; empty where nothing is scaled."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on with a saved factor."""
        if self.enabled and state:
            self._scaler.load_state_dict(state)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss that backward is called on."""
        return self._scaler.scale(loss)

    def unscale(self) -> None:
        """Give the gradients their own size. A collective."""
        if self.enabled:
            self._scaler.unscale_(self._optimizer)

    def step(self, number: int) -> None:
        """Update the parameters, unless a gradient overflowed on some rank.

        Raises:
            DivergedError: Gradients overflow whatever the factor is.
        """
        self._scaler.step(self._optimizer)
        self._scaler.update()
        if self.enabled and self._scaler.get_scale() < SMALLEST:
            raise DivergedError(
                f"gradients of step {number}: expected finite numbers at some loss scale; got "
                f"none down to {self._scaler.get_scale():g}. Lower training.learning_rate, or use "
                "sharding.param_dtype: bf16."
            )
