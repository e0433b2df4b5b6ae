"""What an optimizer keeps for every trained parameter."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fullshard.config.training import TrainingConfig
from fullshard.config.values import Optimizer


@dataclass(frozen=True, slots=True)
class OptimizerStates:
    """What is kept for the elements of a parameter that a rank holds, and beside them.

    Attributes:
        name: Of the optimizer, as people know it.
        num_states: Of the parameter's shape, in the master dtype: two moments of AdamW.
        num_averages: Averages of the weights that are kept beside them, likewise.
        other_bytes: An element, whatever the master dtype is: of optimizers that are not ours.
        count_bytes: A parameter: AdamW counts the updates of each, as a float32.
    """

    name: str
    num_states: int
    num_averages: int = 0
    other_bytes: float = 0.0
    count_bytes: int = 0

    @property
    def row(self) -> str:
        """The name of its row of memory."""
        return f"optimizer ({self.name})"

    def element_bytes(self, itemsize: int) -> float:
        """An element's states, averages left out."""
        return self.num_states * itemsize + self.other_bytes

    def kept_bytes(self, itemsize: int) -> float:
        """An element's states and averages."""
        return self.element_bytes(itemsize) + self.num_averages * itemsize


ADAMW = OptimizerStates("AdamW", 2, count_bytes=4)
SGD = OptimizerStates("SGD", 0)  # of this project's runs: without momentum


def of_bytes(element_bytes: float) -> OptimizerStates:
    """An optimizer of which only the bytes of its states are known, an element."""
    return OptimizerStates(f"{element_bytes:g} bytes", 0, other_bytes=element_bytes)


def states_of(training: TrainingConfig) -> OptimizerStates:
    """What a run keeps."""
    plain = SGD if training.optim is Optimizer.SGD else ADAMW
    return replace(plain, num_averages=int(training.ema_decay is not None))
