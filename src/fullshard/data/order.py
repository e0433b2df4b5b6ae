"""Which sample every rank sees in every step: a function of step, rank and seed alone.

    epoch       a permutation of all sequences, drawn from (seed, epoch)
    global      |<------ step 0 ------>|<------ step 1 ------>| ... | rest: dropped
    in a step   | micro 0              | micro 1              |
                | rank 0   | rank 1    | rank 0   | rank 1    |      each per_device samples

The set of a step does not depend on how many ranks share it, so a run at another world size with
the same global batch sees the same samples in the same steps; where the batch does not divide,
some places are empty. Nothing but the number of finished steps is needed to go on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from fullshard.errors import DataError

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BatchShape:
    """How a global batch is divided: per_device x accumulation x world.

    Attributes:
        samples: Samples of one step, where they do not fill every place; None: they do.
    """

    per_device: int
    accumulation: int
    world_size: int
    samples: int | None = None

    @classmethod
    def of_batch(cls, global_batch: int, per_device: int, world_size: int) -> BatchShape:
        """The fewest micro-batches of at most `per_device` that hold a global batch, evenly."""
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
        num_samples: Sequences in the data.
        shape: How a global batch is divided.
        seed: Seed of the shuffling.
    """

    num_samples: int
    shape: BatchShape
    seed: int

    def __post_init__(self) -> None:
        if self.num_samples < self.shape.global_batch:
            shape = self.shape
            raise DataError(
                f"data.path: expected at least {shape.global_batch:,} sequences (one step: "
                f"{shape.per_device} a rank x {shape.accumulation} micro-batches x "
                f"{shape.world_size} ranks), got {self.num_samples:,}. Give more text, or lower "
                "training.max_seq_length or training.per_device_train_batch_size."
            )

    @property
    def steps_per_epoch(self) -> int:
        return self.num_samples // self.shape.global_batch

    @property
    def num_dropped(self) -> int:
        """Sequences at the end of each epoch that fill no whole global batch."""
        return self.num_samples % self.shape.global_batch

    def of_step(self, step: int) -> Indices:
        """Samples of an update, shape (accumulation, world_size, per_device); step from 0.

        Empty places hold -1.
        """
        shape = self.shape
        epoch, place = divmod(step, self.steps_per_epoch)
        begin = place * shape.global_batch
        permutation = _permutation(self.num_samples, self.seed, epoch)
        chosen = np.full(shape.places, -1, dtype=np.int64)
        chosen[: shape.global_batch] = permutation[begin : begin + shape.global_batch]
        return chosen.reshape(shape.accumulation, shape.world_size, shape.per_device)


@lru_cache(maxsize=2)
def _permutation(num_samples: int, seed: int, epoch: int) -> Indices:
    """The shuffled samples of an epoch; the two newest are kept."""
    permutation = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_samples)
    permutation.flags.writeable = False
    return permutation


def evaluation_samples(num_samples: int, per_device: int, world_size: int) -> Indices:
    """Held-out samples in batches, shape (num_batches, world_size, per_device).

    Every rank gets the same number of batches, since every rank takes part in each forward;
    places beyond the end hold -1 and count nothing.
    """
    global_batch = per_device * world_size
    num_batches = -(-num_samples // global_batch)
    samples = np.full(num_batches * global_batch, -1, dtype=np.int64)
    samples[:num_samples] = np.arange(num_samples)
    return samples.reshape(num_batches, world_size, per_device)
