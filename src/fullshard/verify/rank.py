"""One rank of `fullshard verify`.

It trains with the loop of a run and writes this rank's pieces of every tensor. Only the saved state
is gathered by the engine, because there the gather itself is checked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import Optimizer

import fullshard as fs
from fullshard.config.schema import ShardConfig
from fullshard.config.values import LrSchedule
from fullshard.engine.attributes import tensors_in
from fullshard.engine.cuts import Cut
from fullshard.engine.engine import engine_of
from fullshard.engine.hugging_face import build, read_config
from fullshard.engine.parameter import ShardedParameter
from fullshard.errors import CheckpointError, DivergedError, EngineError
from fullshard.models.config import quiet_libraries
from fullshard.observe.metrics import AnyRow, StepRow
from fullshard.recipes.base import Batch, Objective, RankTeam, num_predicted, whole_logits_loss
from fullshard.recipes.context import divide, part_of
from fullshard.recipes.head import Head, next_token
from fullshard.run.loop import Loop, LoopSettings, Watcher
from fullshard.run.on_torch import TorchTrainee
from fullshard.run.optim import Schedule
from fullshard.verify.compare import WEIGHTS, CheckJob, Pass
from fullshard.verify.faults import Injection


class RankResults(Watcher):
    """The results of one rank, recorded as the loop's watcher.

    Attributes:
        tensors: Pieces of this rank: `STEP/gradient/NAME` (clipped), `STEP/parameter/NAME`, and
            `MODEL/at/NAME`, the positions of its elements in the trained (0) or loaded (1) model.
        facts: Everything else, as JSON values.
    """

    def __init__(self) -> None:
        self.step = 0  # counts the step after loading too
        self.tensors: dict[str, torch.Tensor] = {}
        self.facts: dict[str, Any] = {name: [] for name in ("losses", "loss", "norm")}
        self.facts |= {"units": {}, "first_nan": None}

    def tell(self, row: AnyRow) -> None:
        assert isinstance(row, StepRow), "nothing else happens here"
        self.facts["loss"].append(row.loss)
        self.facts["norm"].append(row.grad_norm)
        self.step += 1

    def watch(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Records the pieces at every update, and the first module that returns a NaN."""
        params = dict(model.named_parameters())
        which = int(self.step > 0)  # the loaded model
        for name, param in params.items():
            self.tensors[f"{which}/at/{name}"], self.facts["units"][name] = _place(param)

        def before(*_: Any) -> None:
            for name, param in params.items():
                if param.grad is not None:
                    self._keep("gradient", name, param.grad)

        def after(*_: Any) -> None:
            for name, param in params.items():
                self._keep("parameter", name, param)

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        for name, module in model.named_modules():
            if module._parameters:
                module.register_forward_hook(partial(self._see, name))

    def _keep(self, kind: str, name: str, value: Any) -> None:
        local = value.to_local() if hasattr(value, "to_local") else value.detach().reshape(-1)
        kept = local.detach().reshape(-1).cpu().clone()
        self.tensors[f"{self.step}/{kind}/{name}"] = kept

    def _see(self, name: str, *module_args_output: Any) -> None:
        if self.facts["first_nan"] is None and any(
            bool(tensor.isnan().any()) for tensor in tensors_in(module_args_output[-1])
        ):
            self.facts["first_nan"] = {"module": name, "step": self.step}

    def write(self, folder: Path, rank: int) -> None:
        """Writes everything for the comparison."""
        save_file(self.tensors, folder / f"rank_{rank}.safetensors")
        (folder / f"rank_{rank}.json").write_text(json.dumps(self.facts))


class _Batches:
    """The job's batches from step `first` on, with the loss of pre-training."""

    samples_per_step = 1
    steps_per_epoch = 1
    tokens_per_step = None
    count = staticmethod(num_predicted)

    def __init__(self, training: _Training, source: int, first: int, injection: Injection) -> None:
        self._training, self._source, self.first = training, source, first
        self._injection = injection

    def micro_batches(self, step: int) -> list[Batch]:
        training, step = self._training, self.first + step
        self._injection.step = step
        training.record.facts["losses"].append([])
        prefixes = [f"{step}.{self._source}.{n}" for n in range(training.job.num_micro_batches)]
        found, seat, kinds = training.batches, training.seat, ("input_ids", "labels")
        batches = (part_of({k: found[f"{at}.{k}"] for k in kinds}, seat) for at in prefixes)
        return [{k: v.to(seat.device) for k, v in batch.items()} for batch in batches]

    def held_out(self) -> Iterable[Batch]:
        return ()

    def loss(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
        total, count = self._training.objective(model, batch)
        self._training.record.facts["losses"][-1].append(float(total.detach()))
        return total, count


class _Training:
    """One pass of the job on this rank."""

    def __init__(self, folder: Path, job: CheckJob, choice: Pass, rank: int) -> None:
        self.folder, self.job, self.choice = folder, job, choice
        self.seat = job.seat(rank, f"cuda:{rank}" if job.device == "cuda" else "cpu")
        self.batches = load_file(folder / "batches.safetensors")
        self.record = RankResults()
        self.objective: Objective = whole_logits_loss

    def build(self, injection: Injection, weights: Path | None) -> tuple[nn.Module, Optimizer]:
        """The sharded model, with random weights if none are given, and its optimizer."""
        job, numbers = self.job, self.job.optimizer
        torch.manual_seed(5)
        config = read_config(self.folder, "model")
        model = build(config, dtype=torch.float32, **job.model_arguments)
        model.to(getattr(torch, self.choice.master_dtype))
        if weights is not None:
            model.load_state_dict(load_file(weights))
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        for name, param in model.named_parameters():
            param.requires_grad_(name not in job.frozen)
        injection.loaded(model)
        device = self.seat.device
        sharding = injection.sharding(ShardConfig.of(self.choice.sharding), device)
        divide(model, self.seat)
        if job.loss_chunk_size is not None and not self.choice.rounds_alike:
            self.objective = next_token(Head(model), job.loss_chunk_size)
        fs.shard(model.to(device).train(), sharding.without("context"), poison=True)
        injection.attach(model)
        optimizer = torch.optim.AdamW(
            [param for param in model.parameters() if param.requires_grad],
            lr=numbers["learning_rate"],
            betas=(numbers["beta1"], numbers["beta2"]),
            eps=numbers["epsilon"],
            weight_decay=numbers["weight_decay"],
        )
        return model, optimizer

    def run(self, model: nn.Module, optimizer: Optimizer, data: _Batches, num_steps: int) -> None:
        """Train with the loop of a run."""
        self.record.watch(model, optimizer)
        rate = self.job.optimizer["learning_rate"]
        settings = LoopSettings(
            num_steps=num_steps,
            eval_every=0,
            max_grad_norm=self.job.max_norm(data.first),
            schedule=Schedule(LrSchedule.CONSTANT, rate, 0, num_steps),
        )
        trainee = TorchTrainee(model, optimizer, lambda: (0, 0))
        team = RankTeam(engine_of(model).transport, self.seat)
        Loop(trainee, data, settings, team, self.record).run()


def run_pass(folder: Path, job: CheckJob, choice: Pass, rank: int) -> None:
    """Train, save, load into a fresh model and train one more step; record all results."""
    training, injection = _Training(folder, job, choice, rank), Injection(job.fault)
    model, optimizer = training.build(injection, folder / WEIGHTS)
    results = folder / choice.name
    results.mkdir(exist_ok=True)
    try:
        source = injection.source(training.seat.batch, job.num_batches)
        data = _Batches(training, source, 0, injection)
        training.run(model, optimizer, data, job.num_steps)
        state = fs.full_state_dict(model)
        if rank == 0:
            apart = {name: value.clone() for name, value in state.items()}  # tied names share one
            save_file(apart, results / "state.safetensors")
        fs.save(results / "checkpoint", model, optimizer)
        model, optimizer = training.build(Injection(), None)
        fs.load(results / "checkpoint", model, optimizer)
        data = _Batches(training, training.seat.batch, job.num_steps, Injection())
        training.run(model, optimizer, data, 1)
    except (DivergedError, CheckpointError, EngineError) as error:
        # On all ranks; missing results are wrong. The engine finds some injected faults itself.
        if job.fault is None and isinstance(error, EngineError):
            raise
    training.record.write(results, rank)


def _place(param: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Positions of this rank's elements in a flat parameter, and the parameter's unit."""
    if not isinstance(param, ShardedParameter):
        return torch.arange(param.numel()), ""
    place, cut = fs.sharding(param), Cut.of(param)
    if cut is None:
        return torch.arange(place.start, place.stop), place.unit
    at = cut.local_of(torch.arange(math.prod(cut.shape)).view(cut.shape))
    return at.reshape(-1)[place.start : place.stop].clone(), place.unit


def run_passes(folder: Path) -> None:
    """Runs every pass of the folder's job on this rank, inside a process group."""
    torch.set_num_threads(1)
    quiet_libraries()
    job = CheckJob.read(folder)
    for choice in job.passes:
        run_pass(folder, job, choice, dist.get_rank())
