"""The folder of JSON and safetensors that `verify` exchanges with its two sides.

job.json              numbers, passes, sharding            both sides
config.json           the shrunk model's configuration     both
weights.safetensors   every weight, perturbed              both
batches.safetensors   STEP.BATCH.MICRO.input_ids, .labels  both
PASS/reference.*      what one process computed            written by reference.py
PASS/rank_K.*         what rank K computed                 written by rank.py, or for every device
                                                           by xla.py
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors.torch import save_file
from torch import nn

from fullshard.config.schema import ShardConfig
from fullshard.recipes.base import IGNORED, Seat

NUM_STEPS = 3  # one more follows after saving and loading
NUM_SEQUENCES = 2
NUM_TOKENS = 12
JOB_FILE = "job.json"
# Tolerances: in float64; in float64 if the model still returns float32 logits (two ways to write a
# loss then differ by 1e-7); below float32.
EXACT, SINGLE, LOW = 1e-9, 1e-4, 0.2

# The epsilon is large. An update is a gradient over the root of its square, so with the usual 1e-8
# the rounding noise of gradients that should be zero (a bias before a norm) would move weights.
OPTIMIZER = {
    "learning_rate": 1e-2,
    "beta1": 0.9,
    "beta2": 0.95,
    "epsilon": 1e-4,
    "weight_decay": 0.1,
}
MAX_GRAD_NORM = 0.5


@dataclasses.dataclass(frozen=True)
class Pass:
    """One comparison in one choice of dtypes.

    Attributes:
        name: "float64", or the user's compute dtype.
        tolerance: Largest relative difference that counts as equal.
        sharding: Fields of ShardConfig.
        loss_scale: Loss scale of the reference, against underflow of float16 gradients.
        wide: The reference computes in float64 throughout. transformers computes norms and rotary
            positions in float32, also in float64 models.
    """

    name: str
    tolerance: float
    sharding: dict[str, Any]
    master_dtype: str = "float64"
    compute_dtype: str = "float64"
    reduce_dtype: str = "float64"
    loss_scale: float = 1.0
    wide: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether single elements are compared. Below float32 one value that rounds the other way
        makes a large error, so the root mean square is compared.
        """
        return self.compute_dtype == "float64" or self.tolerance < LOW


@dataclasses.dataclass(frozen=True)
class Job:
    """Numbers that both sides read; the module's docstring lists the files next to them."""

    passes: tuple[Pass, ...]
    world_size: int
    num_micro_batches: int
    frozen: tuple[str, ...]
    model_arguments: dict[str, Any]
    device: str = "cpu"
    fault: str | None = None
    num_steps: int = NUM_STEPS
    max_grad_norm: float = MAX_GRAD_NORM
    optimizer: dict[str, float] = dataclasses.field(default_factory=lambda: dict(OPTIMIZER))

    def seat(self, rank: int, device: str = "cpu") -> Seat:
        """A rank's place on the axes, which are those of every pass."""
        sharding = ShardConfig.of(self.passes[0].sharding)
        return Seat(rank, self.world_size, torch.device(device), sharding)

    @property
    def num_batches(self) -> int:
        """Batches of a micro-batch over all ranks."""
        return self.seat(0).num_batches

    @property
    def told_steps(self) -> tuple[int, ...]:
        """Steps whose gradients and parameters are written; losses and norms always are."""
        last = self.num_steps
        return tuple(step for step in range(last + 1) if step < NUM_STEPS or step >= last - 1)

    def write(self, folder: Path) -> None:
        """Writes job.json."""
        more = {"told_steps": self.told_steps, "num_batches": self.num_batches}
        fields = {**dataclasses.asdict(self), **more}
        (folder / JOB_FILE).write_text(json.dumps(fields))

    @staticmethod
    def read(folder: Path) -> Job:
        """Reads job.json."""
        return TypeAdapter(Job).validate_json((folder / JOB_FILE).read_bytes())


def write_batches(folder: Path, job: Job, vocab_size: int) -> None:
    """Random tokens for every step, rank and micro-batch.

    Batches have different numbers of label tokens, so that a mean of means differs from the mean
    over all tokens.
    """
    generator = torch.Generator().manual_seed(17)
    batches: dict[str, torch.Tensor] = {}
    shape = (NUM_SEQUENCES, NUM_TOKENS)
    for step in range(job.num_steps + 1):
        for rank in range(job.num_batches):
            for micro in range(job.num_micro_batches):
                ids = torch.randint(0, vocab_size, shape, generator=generator)
                labels = ids.clone()
                labels[0, : 2 + (3 * rank + 2 * micro + step) % 7] = IGNORED
                batches[f"{step}.{rank}.{micro}.input_ids"] = ids
                batches[f"{step}.{rank}.{micro}.labels"] = labels
    save_file(batches, folder / "batches.safetensors")


def write_weights(folder: Path, model: nn.Module) -> None:
    """Writes the model's state with noise on every weight, because ones and zeros hide faults."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            width = param.shape[-1] if param.ndim > 1 else 1
            noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            param.add_((min(0.1, width**-0.5) * noise).to(param))
    state = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    save_file({name: value.contiguous() for name, value in state.items()}, folder / WEIGHTS)


WEIGHTS = "weights.safetensors"
