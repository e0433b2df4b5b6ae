"""What an optimizer keeps for every trained parameter."""

from __future__ import annotations

from dataclasses import dataclass

from fullshard.config.training import TrainingConfig
from fullshard.config.values import Optimizer


@dataclass(frozen=True, slots=True)
class OptimizerStates:
    """States that have the shape and the dtype of their master parameter.

    Attributes:
        name: Of the optimizer, as people know it.
        num_states: For each parameter: two moments of AdamW.
        num_averages: Averages of the weights that are kept beside them.
    """

    name: str
    num_states: int
    num_averages: int = 0

    @property
    def num_kept(self) -> int:
        """All that is kept for each parameter."""
        return self.num_states + self.num_averages


ADAMW = OptimizerStates("AdamW", 2)
SGD = OptimizerStates("SGD", 0)  # of this project's runs: without momentum


def states_of(training: TrainingConfig) -> OptimizerStates:
    """What a run keeps."""
    plain = SGD if training.optim is Optimizer.SGD else ADAMW
    averages = int(training.ema_decay is not None)
    return OptimizerStates(plain.name, plain.num_states, averages)
