"""The loop's counterpart on XLA, where an update is one program.

The recipe's data, the rows and who is told of them are those of the other loop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jax.experimental import multihost_utils

from fullshard.errors import DivergedError
from fullshard.observe.metrics import StepRow
from fullshard.recipes.base import IGNORED, Batch
from fullshard.recipes.distill.logits import TOP_IDS, TOP_VALUES
from fullshard.recipes.pretrain import PackedText
from fullshard.recipes.sft import Chats
from fullshard.run.steps import LoopSettings, StepLoop, Watcher, diverged
from fullshard.run.xla_checkpoints import XlaCheckpoints
from fullshard.xla.step import State, Step

KEYS = ("input_ids", "labels", "position_ids", TOP_VALUES, TOP_IDS)


@dataclass
class XlaTrainee:
    """What is trained, and the programs that do it.

    Attributes:
        state: Parameters and optimizer; each step uses it up and makes the next.
        step: An update.
        totals: (state, batch) -> summed loss and label tokens, over all ranks.
        memory_bytes: Memory of this process: now, and the most so far.
        done: Steps that were finished before.
        beside: A training batch with what else a step needs of it.
    """

    state: State
    step: Step
    totals: Callable[[State, Any], tuple[Any, Any]]
    memory_bytes: Callable[[], tuple[int, int]]
    done: int = 0
    beside: Callable[[Batch], Batch] = lambda batch: batch


class XlaLoop(StepLoop):
    """Runs packed text, or chats, over a number of steps."""

    def __init__(
        self,
        trainee: XlaTrainee,
        recipe: PackedText | Chats,
        settings: LoopSettings,
        keeper: XlaCheckpoints,
        watcher: Watcher,
    ) -> None:
        super().__init__(settings, watcher)
        self._trainee = trainee
        self._recipe = recipe
        self._length = recipe.length if isinstance(recipe, Chats) else None
        self._keeper = keeper

    def held_out_loss(self, step: int) -> float | None:
        """In nats a token, the same on all ranks; None where nothing is held out."""
        self._watcher.entered("evaluation", step)
        sums = []
        for batch in self._recipe.held_out():
            if self._stops_within(step):
                return None
            arrays = _arrays([self._filled(batch)])
            sums.append(self._trainee.totals(self._trainee.state, arrays))
        if not sums:
            return None
        return sum(float(total) for total, _ in sums) / sum(float(count) for _, count in sums)

    def _step(self, step: int) -> StepRow:
        """One update and what it was like."""
        trainee, learning_rate = self._trainee, self._settings.schedule.learning_rate(step - 1)
        self._watcher.entered("data loading", step)
        began = time.perf_counter()
        batches = self._recipe.micro_batches(step - 1)
        arrays = _arrays([trainee.beside(self._filled(batch)) for batch in batches])
        data_s = time.perf_counter() - began
        self._watcher.entered("forward and backward", step)
        trainee.state, found = trainee.step(trainee.state, arrays, learning_rate=learning_rate)
        loss, norm = float(found["loss"]), float(found["grad_norm"])
        for what, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                raise DivergedError(diverged(what, value, step))
        self._watcher.entered("end of step", step)
        num_inputs = sum(batch["input_ids"].numel() for batch in batches)
        elapsed_s = time.perf_counter() - began
        table = _exchange(
            [elapsed_s, data_s, *trainee.memory_bytes(), num_inputs, self._asked_to_stop()]
        )
        elapsed, data, memory, peak, inputs, asked = table.T
        self._stopping = bool(asked.any())
        step_time_s, waited_s = float(elapsed.max()), float(data.mean())
        return StepRow(
            step=step,
            epoch=step / self._recipe.steps_per_epoch,
            loss=loss,
            grad_norm=norm,
            learning_rate=learning_rate,
            tokens_per_s=float(inputs.sum()) / step_time_s,
            samples_per_s=self._recipe.samples_per_step / step_time_s,
            step_time_s=step_time_s,
            data_s=waited_s,
            compute_s=max(0.0, step_time_s - waited_s),
            comm_s=0.0,  # inside of the program: a profile shows it
            memory_bytes=int(memory.max()),
            memory_peak_bytes=int(peak.max()),
        )

    def _filled(self, batch: Batch) -> Batch:
        """Rows of chats are as long as rows may be: another shape would be another program."""
        return batch if self._length is None else _filled(batch, self._length)

    def _on_any_rank(self, flag: float) -> bool:
        return bool(_exchange([flag]).any())

    def _asked_to_stop(self) -> bool:
        return self._keeper.asked_to_stop()

    def _keep(self, step: int, *, stopping: bool, last: bool) -> bool:
        self._keeper.state = self._trainee.state
        return self._keeper.keep(step, stopping=stopping, last=last)


def _arrays(batches: Sequence[Batch]) -> dict[str, np.ndarray]:
    """This rank's samples; micro-batches, where there are several, on an axis before."""
    stacked = {
        key: np.stack([_narrow(batch[key].numpy()) for batch in batches])
        for key in KEYS
        if key in batches[0]
    }
    return stacked if len(batches) > 1 else {key: value[0] for key, value in stacked.items()}


def _narrow(values: np.ndarray) -> np.ndarray:
    """Tokens as int32."""
    return values.astype(np.int32) if values.dtype.kind == "i" else values


def _filled(batch: Batch, length: int) -> Batch:
    """Rows of one length, as if the batch's longest were as long: see [Note: documents]."""
    ids = batch["input_ids"]
    num_rows, here = ids.shape
    more, places = length - here, torch.arange(length)
    first = places[:here].expand(num_rows, here)
    own = batch.get("position_ids", first)
    # What fills begins anew in each row, and is learned by nobody.
    filled = torch.cat([own, places[:more].expand(num_rows, more)], 1)
    return batch | {
        "input_ids": F.pad(ids, (0, more)),
        "labels": F.pad(batch["labels"], (0, more), value=IGNORED),
        "position_ids": filled,
    }


def _exchange(values: Sequence[float]) -> np.ndarray:
    """(ranks, values): every rank's. Float32 is exact enough for what is shown."""
    return np.atleast_2d(multihost_utils.process_allgather(np.array(values, np.float32)))
