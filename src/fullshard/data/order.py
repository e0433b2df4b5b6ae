"""The samples of every rank in every step, a function of only step, rank and seed.

    epoch       a permutation of all sequences, keyed by (seed, epoch), computed on demand
    global      |<------ step 0 ------>|<------ step 1 ------>| ... | rest: dropped
    in a step   | micro 0              | micro 1              |
                | rank 0   | rank 1    | rank 0   | rank 1    |      each per_device samples

The samples of a step do not depend on the number of ranks, so a run with another world size and the
same global batch sees the same samples in the same steps. If the batch does not divide evenly, some
places are empty. A run needs only the number of finished steps to resume, and no memory grows with
the size of the data.

    mixture     an epoch has as many places as there are sequences, divided by weight; each source
                has a permutation of its own, and a new one when all its sequences were used
    stream      a block of sequences is permuted at a time; the blocks of a source follow each other

References:
    Luby and Rackoff, How to construct pseudorandom permutations from pseudorandom functions, 1988.
    Black and Rogaway, Ciphers with arbitrary finite domains, 2002 (cycle walking).
    Mitchell et al., Bandwidth-optimal random shuffling for GPUs, 2021.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fullshard.errors import DataError

Indices = npt.NDArray[np.int64]
ENDLESS = 1 << 48  # sequences of a source that is streamed
ROUNDS = 8  # an even number; four are enough for an ideal round function
_ONE = np.uint64(1)


@dataclass(frozen=True)
class BatchShape:
    """How a global batch is divided: per_device x accumulation x world.

    Attributes:
        samples: Samples per step if they do not fill every place; None: they do.
    """

    per_device: int
    accumulation: int
    world_size: int
    samples: int | None = None

    @classmethod
    def of_batch(cls, global_batch: int, per_device: int, world_size: int) -> BatchShape:
        """The fewest even micro-batches of at most `per_device` for a global batch."""
        accumulation = -(-global_batch // (per_device * world_size))
        per_device = -(-global_batch // (accumulation * world_size))
        places = per_device * accumulation * world_size
        samples = global_batch if places > global_batch else None
        return cls(per_device, accumulation, world_size, samples)

    @property
    def places(self) -> int:
        return self.per_device * self.accumulation * self.world_size

    @property
    def global_batch(self) -> int:
        """Samples of one step."""
        return self.places if self.samples is None else self.samples


@dataclass(frozen=True)
class SampleOrder:
    """The order of samples over all steps.

    Attributes:
        num_samples: Number of sequences in the data; of a stream, an estimate.
        shape: Division of a global batch.
        seed: Seed of the permutations.
        mixture: (sequences, places in an epoch) of each source, in the order in which their
            sequences are numbered; empty: there is one source. Of a stream, its share in a block.
        block: Sequences of a stream that are permuted together; 0: there is no stream.
    """

    num_samples: int
    shape: BatchShape
    seed: int
    mixture: tuple[tuple[int, int], ...] = ()
    block: int = 0

    def __post_init__(self) -> None:
        if self.num_samples < self.shape.global_batch:
            shape = self.shape
            raise DataError(
                f"data.path: expected at least {shape.global_batch:,} sequences (one step: "
                f"{shape.per_device} per rank x {shape.accumulation} micro-batches x "
                f"{shape.world_size} ranks), got {self.num_samples:,}. Add more data, or lower "
                "training.per_device_train_batch_size or, for text, training.max_seq_length."
            )

    @property
    def steps_per_epoch(self) -> int:
        return self.num_samples // self.shape.global_batch

    @property
    def num_dropped(self) -> int:
        """Sequences at the end of each epoch that do not fill a global batch."""
        return 0 if self.block else self.num_samples % self.shape.global_batch

    def streamed(self, buffer: int) -> SampleOrder:
        """The order of a stream with blocks of at least `buffer` samples, in whole steps."""
        block = -(-buffer // self.shape.global_batch) * self.shape.global_batch
        places = apportioned(block, [places for _, places in self.mixture])
        mixture = tuple((ENDLESS, place) for place in places)
        return replace(self, mixture=mixture, block=block)

    def of_step(self, step: int) -> Indices:
        """Samples of an update, shape (accumulation, world_size, per_device); step from 0.

        Empty places are -1.
        """
        shape, size = self.shape, self.block or self.num_samples
        epoch, place = divmod(step, size // shape.global_batch)
        begin = place * shape.global_batch
        drawn = np.arange(begin, begin + shape.global_batch)
        drawn = permuted(drawn, size, (self.seed, epoch))
        chosen = np.full(shape.places, -1, dtype=np.int64)
        chosen[: shape.global_batch] = self._of_sources(drawn, epoch) if self.mixture else drawn
        return chosen.reshape(shape.accumulation, shape.world_size, shape.per_device)

    def _of_sources(self, drawn: Indices, epoch: int) -> Indices:
        """The sequences of all sources at some places of an epoch."""
        chosen, first_place, first_row = np.empty_like(drawn), 0, 0
        for number, (size, places) in enumerate(self.mixture):
            here = (drawn >= first_place) & (drawn < first_place + places)
            turns, rows = np.divmod(epoch * places + drawn[here] - first_place, size)
            for turn in np.unique(turns) if size < ENDLESS else ():
                key = (self.seed, int(turn), number)
                rows[turns == turn] = permuted(rows[turns == turn], size, key)
            chosen[here] = first_row + rows
            first_place, first_row = first_place + places, first_row + size
        return chosen


def apportioned(total: int, weights: Sequence[float]) -> list[int]:
    """Divides a count by weight; the largest remainders get the rest."""
    if not math.isfinite(total * sum(weights)):  # other counts would change the order of runs
        weights = [weight / max(weights) for weight in weights]
    exact = [total * weight / sum(weights) for weight in weights]
    places = [int(one) for one in exact]
    for at in sorted(range(len(exact)), key=lambda at: places[at] - exact[at])[
        : total - sum(places)
    ]:
        places[at] += 1
    return places


def permuted(indices: Indices, size: int, key: tuple[int, ...]) -> Indices:
    """A keyed permutation of range(size), applied to some indices.

    A Feistel network permutes the smallest range of 2^n >= size; its halves have nearly equal
    length. Results outside range(size) are permuted again, fewer than two times on average.

    Args:
        indices: (n,) indices in [0, size).
        size: Length of the range.
        key: Numbers >= 0; another key gives an unrelated permutation.
    """
    bits = max(2, (size - 1).bit_length())
    halves = np.uint64(bits // 2), np.uint64(bits - bits // 2)
    keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64)
    found, outside = indices.astype(np.uint64), np.arange(len(indices))
    while len(outside):
        left, right = found[outside] >> halves[1], found[outside] & (_ONE << halves[1]) - _ONE
        for number, round_key in enumerate(keys):
            drop = np.uint64(64) - halves[number % 2]
            left, right = right, left ^ (_mixed(right ^ round_key) >> drop)
        found[outside] = left << halves[1] | right
        outside = outside[found[outside] >= size]
    return found.astype(np.int64)


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """MurmurHash3's finalizer: every bit of the result depends on all of x."""
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))


def evaluation_samples(num_samples: int, per_device: int, world_size: int) -> Indices:
    """Held-out samples in batches, shape (num_batches, world_size, per_device).

    Every rank gets the same number of batches, because every rank takes part in each forward.
    Places beyond the end are -1.
    """
    global_batch = per_device * world_size
    num_batches = -(-num_samples // global_batch)
    samples = np.arange(num_batches * global_batch).reshape(num_batches, world_size, per_device)
    return np.where(samples < num_samples, samples, -1)
