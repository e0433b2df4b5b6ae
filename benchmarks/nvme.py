"""`python -m benchmarks.nvme`: a step with all state on disk, ours and DeepSpeed's NVMe offload.

    fullshard             | read | forward | read, backward, write | read, update, write |
    fullshard, in memory         | forward |       backward        |       update        |
    DeepSpeed             | as the first row, with asynchronous I/O (libaio) on pinned buffers

DeepSpeed needs its own environment (docs/performance.md) and libaio.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import nn

import fullshard as fs
from benchmarks.command import JsonFlag, command_line, run_script
from benchmarks.disk_step import STATE_PER_LAYER
from fullshard.bench.io import MIB, WIDTH
from fullshard.bench.measurement import (
    Neighbours,
    Page,
    describe_versions,
    largest_difference,
    median_of,
    paired_ratio,
    run_ranks,
    slowest,
    timed,
)
from fullshard.cli.bench import OutFlag, WaitFlag, say, show
from fullshard.cli.outcome import Outcome
from fullshard.errors import ConfigError

NAME = "benchmarks.nvme"
OURS, KEPT, MEMORY, THEIRS = (
    "fullshard, nvme",
    "fullshard, nvme, shard_grad_op",
    "fullshard, in memory",
    "DeepSpeed, nvme",
)
LEARNING_RATE, WARM_UP = 1e-4, 2
COLUMNS = ("ranks", "engine", "step, ms [95 %]", "to DeepSpeed [95 %]", "loss differs by")
METHOD = (
    "A stack of linear layers of 1,024 x 1,024 without bias, float32, AdamW, one row a rank. "
    "Parameters, gradients and moments are on disk: ours by offload: nvme, DeepSpeed's by ZeRO "
    "stage 3 with offload_param and offload_optimizer on nvme, pipelined reads and writes, blocks "
    "of 1 MiB, 16 in flight, and its own CPU AdamW.",
    'DeepSpeed gets a buffer for each of the weights, since it ends with "Not enough buffers" if '
    "it has fewer. So it holds all parameters from forward to backward, as ours does with "
    "shard_grad_op, and reads them once a step.",
    "All train in the same processes and take a step each in every round, in turn. A step is as "
    "slow as its slowest rank. Ratios are medians over the rounds, with a 95 % bootstrap interval.",
    "In memory: the same step of ours without offload, by messages (transport: direct): what "
    "compute and messages take.",
    "The difference of losses is the largest over all steps, relative.",
)


@dataclass(frozen=True)
class Job:
    """Settings of the ranks' measurement; `num_bytes` counts parameters, gradients and moments."""

    num_bytes: int
    num_rounds: int
    place: str


def measure(job: Job) -> dict[str, Any]:
    """Returns this rank's seconds by engine and round, and all losses."""
    layers = max(2, job.num_bytes // STATE_PER_LAYER)
    steps = {THEIRS: _deepspeed(job, layers)}
    kinds = dict.fromkeys(("parameters", "gradients", "optimizer"), "nvme")
    on_disk = {**kinds, "folder": job.place}
    ours = {
        OURS: ("full_shard", on_disk),
        KEPT: ("shard_grad_op", on_disk),
        MEMORY: ("full_shard", None),
    }
    for name, (strategy, offload) in ours.items():
        model = fs.shard(
            _model(layers), strategy=strategy, wrap=["Layer"], offload=offload, transport="direct"
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        steps[name] = partial(_step, model, optimizer)
    losses = {name: [step() for _ in range(WARM_UP)] for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(job.num_rounds):
        for name, step in steps.items():
            took_s, _ = timed(lambda step=step, name=name: losses[name].append(step()))
            times[name].append(took_s)
    dist.barrier()
    return {"times": times, "losses": losses}


class Layer(nn.Linear):
    """A linear layer with equal input and output sizes, so that every layer changes the loss."""

    def reset_parameters(self) -> None:
        """Called by torch."""
        nn.init.normal_(self.weight, std=WIDTH**-0.5)


def _model(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(torch.ones(1, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _deepspeed(job: Job, layers: int) -> Callable[[], float]:
    import deepspeed  # pyright: ignore[reportMissingImports]
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # pyright: ignore[reportMissingImports]

    place = {"device": "nvme", "nvme_path": job.place, "pin_memory": False}
    pipelined = {"buffer_count": 16, "pipeline_read": True, "pipeline_write": True}
    numel = WIDTH * WIDTH
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": sys.maxsize,
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {
                **place,
                "buffer_count": layers,
                "buffer_size": numel,
                "max_in_cpu": 0,
            },
            "offload_optimizer": {**place, **pipelined},
            "sub_group_size": 4 * numel,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 2 * numel,
            "stage3_prefetch_bucket_size": 2 * numel,
            "reduce_bucket_size": 2 * numel,
        },
        "aio": {
            "block_size": MIB,
            "queue_depth": 16,
            "thread_count": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    }
    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = _model(layers)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=DeepSpeedCPUAdam(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01),
        config=config,
        dist_init_required=False,
    )

    def step() -> float:
        loss = engine(torch.ones(1, WIDTH)).square().mean()
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def rows_of(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each engine."""
    times = slowest([rank["times"] for rank in ranks])
    losses = largest_difference(ranks[0]["losses"], THEIRS)
    return [
        {
            "name": name,
            "num_ranks": len(ranks),
            "step_s": median_of(times[name]).to_dict(),
            "ratio": paired_ratio(times[name], times[THEIRS]).to_dict(),
            "loss_difference": losses[name],
            "num_rounds": len(times[name]),
        }
        for name in (OURS, KEPT, MEMORY, THEIRS)
    ]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    step, ratio = row["step_s"], row["ratio"]
    return (
        str(row["num_ranks"]),
        row["name"],
        f"{1e3 * step['value']:.0f} [{1e3 * step['low']:.0f}, {1e3 * step['high']:.0f}]",
        f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]",
        f"{row['loss_difference']:.1e}",
    )


def main(
    place: Annotated[Path, typer.Option(file_okay=False, help="Working folder.")] = Path("runs"),
    mib: Annotated[int, typer.Option(min=64, help="Size of all state, MiB.")] = 576,
    rounds: Annotated[int, typer.Option(min=3, help="Timed steps per engine.")] = 11,
    wait: WaitFlag = False,
    out: OutFlag = None,
    as_json: JsonFlag = False,  # noqa: ARG001  read by run_script
) -> Outcome:
    """Measure steps with all state on disk, ours and DeepSpeed's NVMe offload."""
    if find_spec("deepspeed") is None:
        raise ConfigError("deepspeed: expected it to be installed. docs/performance.md says how.")
    rows: list[dict[str, Any]] = []
    place.mkdir(parents=True, exist_ok=True)
    with Neighbours(wait=wait, say=say) as neighbours:
        for count in (2, 1):
            with tempfile.TemporaryDirectory(prefix="bench-nvme-", dir=place) as folder:
                say(f"{count} ranks, {mib} MiB: {rounds} rounds")
                job = Job(mib * MIB, rounds, folder)
                what = f"{NAME}: {count} ranks"
                rows += rows_of(run_ranks(f"{NAME}:measure", job, count, what=what, timeout_s=600))
    told = ("nvme", "State on disk beside DeepSpeed", command_line(NAME), rows, COLUMNS)
    cells, versions = [_cells(row) for row in rows], ("fullshard", "torch", "deepspeed")
    page = Page(*told, cells, METHOD, neighbours, versions=describe_versions(versions))
    return show(page, out)


if __name__ == "__main__":
    run_script(NAME)
