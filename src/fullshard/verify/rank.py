"""One rank of `fullshard verify`: `python -m fullshard.verify.rank FOLDER`.

Trains with the very loop that a run trains with, and writes down this rank's pieces of everything:
nothing that was gathered by the engine takes part in the comparison, except where gathering is what
is compared (the saved state).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fullshard as fs
from fullshard.config.schema import ShardConfig
from fullshard.config.values import LrSchedule
from fullshard.engine.engine import engine_of
from fullshard.engine.hugging_face import build, read_config
from fullshard.engine.kept import tensors_in
from fullshard.engine.parameter import ShardedParameter
from fullshard.errors import CheckpointError, DivergedError
from fullshard.launch.rank_entry import run_rank
from fullshard.models.config import quiet_libraries
from fullshard.observe.metrics import StepRow
from fullshard.recipes.base import Batch, RankTeam, Seat, causal_lm_loss
from fullshard.run.loop import Loop, LoopSettings, Watcher
from fullshard.run.on_torch import TorchTrainee
from fullshard.run.optim import LossScaler
from fullshard.run.schedule import Schedule
from fullshard.verify.faults import Injection, injection_of
from fullshard.verify.job import WEIGHTS, Job, Pass


class RankResults(Watcher):
    """What one rank computed; also the loop's watcher.

    Attributes:
        tensors: `STEP/gradient/NAME` (clipped), `STEP/parameter/NAME`: this rank's pieces.
        facts: Everything else, as JSON.
    """

    def __init__(self) -> None:
        self.step = 0  # of all, counting the one after loading too
        self.tensors: dict[str, torch.Tensor] = {}
        self.facts: dict[str, Any] = {
            "pieces": [],  # of the model that was trained, and of the one that was loaded
            "losses": [],
            "loss": [],
            "norm": [],
            "first_nan": None,
        }

    def stepped(self, row: StepRow) -> None:
        self.facts["loss"].append(row.loss)
        self.facts["norm"].append(row.grad_norm)
        self.step += 1

    def watch(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Write down the pieces at every update, and the first module that makes a NaN."""
        params = dict(model.named_parameters())
        self.facts["pieces"].append({name: _piece(param) for name, param in params.items()})

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
        """Leaves all of it for the comparison."""
        folder.mkdir(exist_ok=True)
        save_file(self.tensors, folder / f"rank_{rank}.safetensors")
        (folder / f"rank_{rank}.json").write_text(json.dumps(self.facts))


class _Batches:
    """The loop's recipe: the job's batches, the loss of pretraining."""

    samples_per_step = 1
    steps_per_epoch = 1
    tokens_per_step = None

    def __init__(
        self, batches: list[list[Batch]], first: int, record: RankResults, injection: Injection
    ) -> None:
        self._batches, self.first = batches, first
        self._record, self._injection = record, injection

    def micro_batches(self, step: int) -> list[Batch]:
        self._injection.begin_step(self.first + step)
        self._record.facts["losses"].append([])
        return self._batches[self.first + step]

    def held_out(self) -> Iterable[Batch]:
        return ()

    def loss(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        total, count = causal_lm_loss(logits, batch["labels"])
        self._record.facts["losses"][-1].append(float(total.detach()))
        return total, count


def run_pass(folder: Path, job: Job, choice: Pass, rank: int) -> None:
    """Train, save, load into a fresh model, train one step more; all of it written down."""
    device = torch.device("cuda", rank) if job.device == "cuda" else torch.device("cpu")
    injection, record = injection_of(job.fault), RankResults()
    model = _build(folder, job, choice, load_file(folder / WEIGHTS), device, injection)
    source = injection.source(rank, job.world_size)
    batches = _batches_of(folder, job, source, device)
    seat = Seat(rank, job.world_size, device)
    team = RankTeam(engine_of(model).transport, seat)
    place = folder / choice.name / "checkpoint"
    try:
        optimizer = _optimizer(model, job)
        batches = _Batches(batches, 0, record, injection)
        _train(model, optimizer, job, batches, record, team)
        state = fs.full_state_dict(model)
        if rank == 0:
            (folder / choice.name).mkdir(exist_ok=True)
            apart = {name: value.clone() for name, value in state.items()}  # tied names share one
            save_file(apart, folder / choice.name / "state.safetensors")
        fs.save(place, model, optimizer)
        fresh = _build(folder, job, choice, None, device, Injection())
        optimizer = _optimizer(fresh, job)
        fs.load(place, fresh, optimizer)
        again = _Batches(_batches_of(folder, job, rank, device), job.num_steps, record, Injection())
        team = RankTeam(engine_of(fresh).transport, seat)
        _train(fresh, optimizer, job, again, record, team)
    except (
        DivergedError,
        CheckpointError,
    ) as error:  # on all ranks alike; what is missing is wrong
        record.facts["diverged"] = str(error)
    record.write(folder / choice.name, rank)


def _optimizer(model: nn.Module, job: Job) -> torch.optim.Optimizer:
    numbers = job.optimizer
    return torch.optim.AdamW(
        [param for param in model.parameters() if param.requires_grad],
        lr=numbers["learning_rate"],
        betas=(numbers["beta1"], numbers["beta2"]),
        eps=numbers["epsilon"],
        weight_decay=numbers["weight_decay"],
    )


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    job: Job,
    recipe: _Batches,
    record: RankResults,
    team: RankTeam,
) -> None:
    """The steps that are left of the job, or one more."""
    num_steps = max(1, job.num_steps - recipe.first)
    numbers = job.optimizer
    record.watch(model, optimizer)
    settings = LoopSettings(
        num_steps=num_steps,
        eval_every=0,
        max_grad_norm=job.max_grad_norm,
        schedule=Schedule(LrSchedule.CONSTANT, numbers["learning_rate"], 0, num_steps),
    )
    scaler = LossScaler(optimizer, torch.device("cpu"), enabled=False)
    trainee = TorchTrainee(model, optimizer, lambda: (0, 0), scaler)
    Loop(trainee, recipe, settings, team, record).run()


def _build(
    folder: Path,
    job: Job,
    choice: Pass,
    weights: dict[str, torch.Tensor] | None,
    device: torch.device,
    injection: Injection,
) -> nn.Module:
    """The job's model, sharded; without weights its own random ones, of the same seed."""
    torch.manual_seed(5)
    model = build(read_config(folder, "model"), dtype=torch.float32, **job.model_arguments)
    model.to(getattr(torch, choice.master_dtype))
    if weights is not None:
        model.load_state_dict(weights)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for name, param in model.named_parameters():
        param.requires_grad_(name not in job.frozen)
    injection.loaded(model)
    sharding = injection.sharding(ShardConfig.of(choice.sharding), device)
    fs.shard(model.to(device).train(), sharding, poison=True)
    injection.attach(model)
    return model


def _batches_of(folder: Path, job: Job, rank: int, device: torch.device) -> list[list[Batch]]:
    """A rank's micro-batches of every step."""
    found = load_file(folder / "batches.safetensors")
    return [
        [
            {
                kind: found[f"{step}.{rank}.{micro}.{kind}"].to(device)
                for kind in ("input_ids", "labels")
            }
            for micro in range(job.num_micro_batches)
        ]
        for step in range(job.num_steps + 1)
    ]


def _piece(param: torch.Tensor) -> dict[str, Any]:
    """Which elements of the whole parameter this rank holds."""
    if not isinstance(param, ShardedParameter):
        return {"start": 0, "stop": param.numel(), "unit": ""}
    place = fs.sharding(param)
    return {"start": place.start, "stop": place.stop, "unit": place.unit}


def run_passes(folder: Path, rank: int) -> None:
    """Every pass of the folder's job on this rank, inside a process group."""
    job = Job.read(folder)
    for choice in job.passes:
        run_pass(folder, job, choice, rank)


def main() -> None:
    """Joins the other ranks, runs the job, leaves."""
    from fullshard.config.environment import hide_accelerators, read_launch_environment
    from fullshard.launch import rendezvous

    folder = Path(sys.argv[1])
    if Job.read(folder).device == "cpu":
        hide_accelerators()
    torch.set_num_threads(1)
    quiet_libraries()
    launch = read_launch_environment()
    assert launch is not None, "verify's ranks are started by our launcher"
    rendezvous.init_process_group()
    run_passes(folder, launch.rank)
    rendezvous.shutdown()


if __name__ == "__main__":
    run_rank(main)
