"""What an optimizer keeps for every trained parameter."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from fullshard.config.training import TrainingConfig
from fullshard.config.values import BY_OWNER, Optimizer

_IN_BLOCKS = re.compile(r"(?:^|\.)\d+\.")
_NO_MATRIX = re.compile(r"embed|wte|wpe|bias")
# What bitsandbytes has: smaller tensors keep float32 states, codes are scaled in blocks, and two
# tables of 256 codes serve all.
LEAST_8BIT, BLOCK_8BIT, TABLES_8BIT = 4096, 256, 2 * 256 * 4


def takes_muon(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a run's Muon trains a parameter: a matrix in one of the model's numbered blocks.

    Embeddings, the head, vectors and stacked experts are AdamW's.
    """
    return len(shape) == 2 and bool(_IN_BLOCKS.search(name)) and not _NO_MATRIX.search(name)


@dataclass(frozen=True, slots=True)
class OptimizerStates:
    """What is kept for the elements of a parameter that a rank holds, and beside them.

    Attributes:
        name: Name of the optimizer, as people know it.
        num_states: States with the parameter's shape, in the master dtype; AdamW has two.
        num_averages: Averages of the weights that are kept beside them, likewise.
        other_bytes: An element, whatever the master dtype is: of optimizers that are not ours.
        count_bytes: A parameter: AdamW counts the updates of each, as a float32.
        owned: Whose whole tensors have owners; the numbers above are of all others.
    """

    name: str
    num_states: int
    num_averages: int = 0
    other_bytes: float = 0.0
    count_bytes: int = 0
    owned: Optimizer | None = None

    @property
    def num_temporaries(self) -> float:
        """Tensors of a whole one's size that its update makes, at most: measured, not derived."""
        return {Optimizer.MUON: 3.1, Optimizer.ADAFACTOR: 2.1}.get(self.owned or Optimizer.SGD, 0.0)

    def owns(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a parameter has an owner, which alone keeps its states."""
        return self.owned is not None and (
            self.owned is not Optimizer.MUON or takes_muon(name, shape)
        )

    def whole_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """What the owner keeps of a whole tensor; tables that serve all tensors left out."""
        numel = math.prod(shape)
        match self.owned:
            case Optimizer.ADAFACTOR:  # and the root mean square of the parameter
                rows = numel // (shape[-1] or 1) + numel // (shape[-2] or 1) if shape[1:] else numel
                return (rows + 1) * max(4, itemsize)
            case Optimizer.ADAMW_BNB_8BIT if numel < LEAST_8BIT:
                return 8 * numel
            case Optimizer.ADAMW_BNB_8BIT:
                return 2 * (numel + 4 * -(-numel // BLOCK_8BIT))
            case _:
                return numel * itemsize

    def table_bytes(self, shape: tuple[int, ...]) -> int:
        """Of tables that serve all tensors of a rank, if a tensor of this shape needs them."""
        is_large = math.prod(shape) >= LEAST_8BIT
        return TABLES_8BIT if self.owned is Optimizer.ADAMW_BNB_8BIT and is_large else 0

    def saved_bytes(self, name: str, shape: tuple[int, ...], itemsize: int) -> float:
        """What a checkpoint has of a trained parameter beside its values."""
        if not self.owns(name, shape):
            return self.kept_bytes(itemsize) * math.prod(shape)
        averages = self.num_averages * itemsize * math.prod(shape)
        return averages + self.whole_bytes(shape, itemsize) + self.table_bytes(shape)

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
MUON = OptimizerStates("Muon, AdamW", 2, count_bytes=4, owned=Optimizer.MUON)
ADAFACTOR = OptimizerStates("Adafactor", 0, owned=Optimizer.ADAFACTOR)
ADAMW_8BIT = OptimizerStates("8-bit AdamW", 0, owned=Optimizer.ADAMW_BNB_8BIT)
SGD = OptimizerStates("SGD", 0)  # of this project's runs: without momentum


def of_bytes(element_bytes: float) -> OptimizerStates:
    """An optimizer of which only the bytes of its states are known, an element."""
    return OptimizerStates(f"{element_bytes:g} bytes", 0, other_bytes=element_bytes)


def states_of(training: TrainingConfig) -> OptimizerStates:
    """What a run keeps."""
    by_name = {
        Optimizer.SGD: SGD,
        **dict(zip(BY_OWNER, (MUON, ADAFACTOR, ADAMW_8BIT), strict=True)),
    }
    plain = by_name.get(training.optim, ADAMW)
    return replace(plain, num_averages=int(training.ema_decay is not None))
