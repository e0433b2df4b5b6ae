"""A tiny language model, and a recipe whose samples have different numbers of label tokens."""

from collections.abc import Iterable

import torch
from torch import nn

import fullshard as fs
from fullshard.config.values import LrSchedule
from fullshard.engine.engine import engine_of
from fullshard.observe.metrics import EvalRow, SaveRow, StepRow
from fullshard.recipes.base import IGNORED, Batch, RankTeam, Seat, causal_lm_loss, num_predicted
from fullshard.run.loop import Loop, LoopSettings
from fullshard.run.on_torch import TorchTrainee
from fullshard.run.optim import Schedule

VOCAB, LENGTH, GLOBAL_BATCH, NUM_STEPS = 11, 6, 8, 3
RATE = 0.5


class TinyLm(nn.Module):
    """Embedding, two blocks and a head, so that each kind of unit exists."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, VOCAB)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def tiny_model() -> TinyLm:
    torch.manual_seed(1)
    return TinyLm().double()


def ragged_samples(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a global batch whose samples have 0 to LENGTH - 1 label tokens each."""
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, VOCAB, (GLOBAL_BATCH, LENGTH), generator=generator)
    labels = ids.clone()
    for sample in range(GLOBAL_BATCH):
        labels[sample, 1 + (sample + step) % LENGTH :] = IGNORED
    return ids, labels


class RaggedRecipe:
    """This rank's part of the ragged samples; the loop must count their tokens."""

    samples_per_step = GLOBAL_BATCH
    steps_per_epoch = 2
    tokens_per_step = None

    def __init__(self, rank: int, world_size: int, accumulation: int) -> None:
        self._rank, self._world_size, self._accumulation = rank, world_size, accumulation
        self.spoil_step = -1

    def micro_batches(self, step: int) -> list[Batch]:
        ids, labels = ragged_samples(step)
        shape = (self._accumulation, self._world_size, -1)
        mine = torch.arange(GLOBAL_BATCH).reshape(shape)[:, self._rank]
        return [{"input_ids": ids[chosen], "labels": labels[chosen]} for chosen in mine]

    def held_out(self) -> Iterable[Batch]:
        """Yields one sample for rank 0, and samples without labels for the others."""
        ids, labels = ragged_samples(1000)
        mine = labels[4:6].clone()
        if self._rank != 0:
            mine[:] = IGNORED
        return [{"input_ids": ids[4:6], "labels": mine}]

    count = staticmethod(num_predicted)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
        total, count = causal_lm_loss(model(batch["input_ids"]), batch["labels"])
        if self.spoil_step >= 0 and self._rank == 0:
            total = total * float("nan")
        return total, count


class Rows:
    """Records the loop's rows."""

    def __init__(self) -> None:
        self.steps, self.evaluations, self.phases, self.saves = [], [], [], []
        self._kinds = {StepRow: self.steps, EvalRow: self.evaluations, SaveRow: self.saves}

    def entered(self, phase, step) -> None:
        self.phases.append((phase, step))

    def tell(self, row) -> None:
        self._kinds[type(row)].append(row)

    def misses_evaluation(self, step) -> bool:
        return all(row.step != step for row in self.evaluations)


def make_loop(
    rank, world_size, accumulation, options, rows
) -> tuple[nn.Module, Loop, RaggedRecipe]:
    model = fs.shard(tiny_model(), poison=True, wrap=["Sequential"], **options)
    engine = engine_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    trainee = TorchTrainee(
        model,
        optimizer,
        memory_bytes=lambda: (1000 * (rank + 1), 2000 * (rank + 1)),
    )
    settings = LoopSettings(
        num_steps=NUM_STEPS,
        eval_every=0,
        max_grad_norm=0.0,
        schedule=Schedule(LrSchedule.CONSTANT, RATE, 0, NUM_STEPS),
    )
    recipe = RaggedRecipe(rank, world_size, accumulation)
    team = RankTeam(engine.transport, Seat(rank, world_size, engine.device))
    return model, Loop(trainee, recipe, settings, team, rows), recipe
