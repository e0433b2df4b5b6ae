"""State sizes of optimizers, and the owners of whole tensors.

[Note: owners of whole tensors]
Some optimizers need all of a tensor at once. Every sharded parameter has one owner among the ranks
that share it. Tensors are assigned in descending size, each to the rank with the fewest elements so
far (LPT), so that states are spread evenly. A step then processes rounds of consecutive parameters.
In a round no owner has more elements than the largest parameter, which bounds the memory of a rank
beyond its shards.

    parameters   a(9)  b(4)  c(4)  d(9)
    2 ranks      0     0     1     1
    rounds       |-1-| |---2---|   |-3-|      rank 0 may not have a and b at the same time
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapreplace

from fullshard.config.training import TrainingConfig
from fullshard.config.values import BY_OWNER, Optimizer
from fullshard.planner.spec import ITEMSIZE
from fullshard.planner.units import GroupPlan

_IN_BLOCKS = re.compile(r"(?:^|\.)\d+\.")
_NO_MATRIX = re.compile(r"embed|wte|wpe|bias")
# bitsandbytes: tensors below LEAST_8BIT keep float32 states, codes are scaled in blocks, and all
# tensors share two tables of 256 codes.
LEAST_8BIT, BLOCK_8BIT, TABLES_8BIT = 4096, 256, 2 * 256 * 4


def takes_muon(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a run's Muon trains a parameter: a matrix in one of the model's numbered blocks.

    AdamW trains embeddings, the head, vectors and stacked experts.
    """
    return len(shape) == 2 and bool(_IN_BLOCKS.search(name)) and not _NO_MATRIX.search(name)


@dataclass(frozen=True, slots=True)
class OptimizerStates:
    """State sizes of one optimizer.

    Attributes:
        name: Name of the optimizer.
        num_states: States with the parameter's shape, in the master dtype; AdamW has two.
        num_averages: Averages of the weights with the parameter's shape, in the master dtype.
        other_bytes: Further bytes per element, whatever the master dtype is.
        count_bytes: Bytes per parameter; AdamW counts the updates of each, as a float32.
        owned: The optimizer of parameters whose whole tensors have owners; None if there is none.
            The sizes above are those of all other parameters.
    """

    name: str
    num_states: int
    num_averages: int = 0
    other_bytes: float = 0.0
    count_bytes: int = 0
    owned: Optimizer | None = None

    @property
    def num_temporaries(self) -> float:
        """Most temporary tensors in the update of a whole tensor, in its size; measured."""
        return {Optimizer.MUON: 3.1, Optimizer.ADAFACTOR: 2.1}.get(self.owned or Optimizer.SGD, 0.0)

    def owns(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a parameter has an owner, the only rank that stores its states."""
        return self.owned is not None and (
            self.owned is not Optimizer.MUON or takes_muon(name, shape)
        )

    def whole_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Returns the owner's bytes for a whole tensor, without shared tables.

        Adafactor's are approximate with a tensor axis, because `shape` assumes that rows are cut.
        """
        numel = math.prod(shape)
        match self.owned:
            case Optimizer.ADAFACTOR:  # row and column means, and the RMS of the parameter
                rows = numel // (shape[-1] or 1) + numel // (shape[-2] or 1) if shape[1:] else numel
                return (rows + 1) * max(4, itemsize)
            case Optimizer.ADAMW_BNB_8BIT if numel < LEAST_8BIT:
                return 8 * numel
            case Optimizer.ADAMW_BNB_8BIT:
                return 2 * (numel + 4 * -(-numel // BLOCK_8BIT))
            case _:
                return numel * itemsize

    def table_bytes(self, shape: tuple[int, ...]) -> int:
        """Returns the bytes of tables that a rank's tensors share, if this shape needs them."""
        is_large = math.prod(shape) >= LEAST_8BIT
        return TABLES_8BIT if self.owned is Optimizer.ADAMW_BNB_8BIT and is_large else 0

    def saved_bytes(self, name: str, shape: tuple[int, ...], itemsize: int) -> float:
        """Returns the bytes of a trained parameter's states in a checkpoint."""
        if not self.owns(name, shape):
            return self.kept_bytes(itemsize) * math.prod(shape)
        averages = self.num_averages * itemsize * math.prod(shape)
        return averages + self.whole_bytes(shape, itemsize) + self.table_bytes(shape)

    @property
    def row(self) -> str:
        """Name of the optimizer's memory row."""
        return f"optimizer ({self.name})"

    def element_bytes(self, itemsize: int) -> float:
        """Returns bytes of states per element, without averages."""
        return self.num_states * itemsize + self.other_bytes

    def kept_bytes(self, itemsize: int) -> float:
        """Returns bytes of states and averages per element."""
        return self.element_bytes(itemsize) + self.num_averages * itemsize


ADAMW = OptimizerStates("AdamW", 2, count_bytes=4)
MUON = OptimizerStates("Muon, AdamW", 2, count_bytes=4, owned=Optimizer.MUON)
ADAFACTOR = OptimizerStates("Adafactor", 0, owned=Optimizer.ADAFACTOR)
ADAMW_8BIT = OptimizerStates("8-bit AdamW", 0, owned=Optimizer.ADAMW_BNB_8BIT)
SGD = OptimizerStates("SGD", 0)  # a run's SGD has no momentum


def of_bytes(element_bytes: float) -> OptimizerStates:
    """Returns an optimizer of which only the bytes of states per element are known."""
    return OptimizerStates(f"{element_bytes:g} bytes", 0, other_bytes=element_bytes)


def states_of(training: TrainingConfig) -> OptimizerStates:
    """Returns the state sizes of a run's optimizer."""
    by_name = {
        Optimizer.SGD: SGD,
        **dict(zip(BY_OWNER, (MUON, ADAFACTOR, ADAMW_8BIT), strict=True)),
    }
    plain = by_name.get(training.optim, ADAMW)
    return replace(plain, num_averages=int(training.ema_decay is not None))


# ---- owners --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Owners:
    """The owner of every parameter.

    Attributes:
        of: The owner's index on the shard axis, for each parameter.
        rounds: Indices of the parameters of each round; every parameter is in one round.
    """

    of: tuple[int, ...]
    rounds: tuple[tuple[int, ...], ...]

    @classmethod
    def choose(cls, numels: Sequence[int], num_parts: int) -> Owners:
        """Returns the owners of parameters of these sizes, in the order of the plan."""
        of = [0] * len(numels)
        loads = [(0, part) for part in range(num_parts)]  # a heap: the least loaded is first
        for index in sorted(range(len(numels)), key=lambda i: -numels[i]):
            load, of[index] = loads[0]
            heapreplace(loads, (load + numels[index], of[index]))
        most = max(numels, default=0)
        rounds: list[list[int]] = []
        held = [0] * num_parts
        for index, numel in enumerate(numels):
            if not rounds or held[of[index]] + numel > most:
                rounds.append([])
                held = [0] * num_parts
            rounds[-1].append(index)
            held[of[index]] += numel
        return cls(tuple(of), tuple(map(tuple, rounds)))


@dataclass(frozen=True, slots=True)
class OwnedTensor:
    """A parameter, its owner among `num_parts` ranks, and its round among tensors of as many.

    Attributes:
        held_bytes: Bytes of the parameter and its gradient that an update allocates.
    """

    shape: tuple[int, ...]
    itemsize: int
    held_bytes: int
    num_parts: int
    owner: int
    turn: int


def owned_tensors(
    trained: Sequence[GroupPlan], optimizer: OptimizerStates
) -> Iterator[OwnedTensor]:
    """Yields the owned tensors of a plan; every rank owns the tensors that are not sharded."""
    if optimizer.owned is None:
        return
    cut = dict[int, list[tuple[tuple[int, ...], int, int]]]()  # by number of parts
    for group in trained:
        itemsize, num_parts = ITEMSIZE[group.dtypes.master], group.layout.num_parts
        for placement in sorted(group.layout.placements, key=lambda placement: placement.name):
            if not optimizer.owns(placement.name, placement.shape):
                continue
            # the owner's part, and the whole that is gathered over other axes
            times = placement.parts + 1 if placement.parts > 1 else int(num_parts > 1)
            entry = placement.whole_shape, itemsize, 2 * itemsize * times * placement.numel
            if times:
                cut.setdefault(num_parts, []).append(entry)  # experts have others
            else:
                yield OwnedTensor(*entry, 1, 0, 0)
    for num_parts, entries in cut.items():
        owners = Owners.choose([math.prod(entry[0]) for entry in entries], num_parts)
        for turn, indices in enumerate(owners.rounds):
            yield from (OwnedTensor(*entries[i], num_parts, owners.of[i], turn) for i in indices)
