"""Learning rate over the steps, by the formulas of Hugging Face.

Each is a pure function of the number of finished steps, so a resumed run needs no state for it.

References:
    transformers/optimization.py, whose LambdaLR multipliers these are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fullshard.config.values import LrSchedule


@dataclass(frozen=True)
class Schedule:
    """A learning rate as a function of the step.

    Attributes:
        kind: The shape after the warm-up.
        peak: The learning rate that the multipliers scale.
        num_warmup_steps: Steps from 0 to the peak, linearly.
        num_steps: Steps of the whole run.
    """

    kind: LrSchedule
    peak: float
    num_warmup_steps: int
    num_steps: int

    def learning_rate(self, finished: int) -> float:
        """The rate of the update that follows `finished` updates."""
        return self.peak * self.multiplier(finished)

    def multiplier(self, finished: int) -> float:
        """The share of the peak after `finished` updates."""
        if self.kind is LrSchedule.CONSTANT:
            return 1.0
        if finished < self.num_warmup_steps:
            return finished / max(1, self.num_warmup_steps)
        left = max(1, self.num_steps - self.num_warmup_steps)
        match self.kind:
            case LrSchedule.CONSTANT_WITH_WARMUP:
                return 1.0
            case LrSchedule.LINEAR:
                return max(0.0, (self.num_steps - finished) / left)
            case LrSchedule.COSINE:
                progress = (finished - self.num_warmup_steps) / left
                return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))


def warmup_steps(warmup: float, warmup_ratio: float, num_steps: int) -> int:
    """Steps of warm-up, as Hugging Face counts them.

    Args:
        warmup: `warmup_steps`: a number of steps, or below 1 a share of all steps.
        warmup_ratio: A share of all steps; counts where `warmup_steps` is 0.
        num_steps: Steps of the whole run.
    """
    if warmup >= 1:
        return int(warmup)
    return math.ceil(num_steps * (warmup or warmup_ratio))
