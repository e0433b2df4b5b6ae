"""`python -m benchmarks.host`: processor time of the engine per unit.

One process runs one rank of many. Nothing is sent and tensors are tiny, so a step is almost all
bookkeeping. The time of the plain model for the same step is subtracted.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import nn

import fullshard as fs
from benchmarks.command import JsonFlag, command_line, run_script
from fullshard.bench.calibrate import make_idle
from fullshard.bench.measurement import Estimate, Neighbours, Page, Say, median_of
from fullshard.cli.bench import OutFlag, WaitFlag, say, show
from fullshard.cli.outcome import Outcome
from fullshard.engine.engine import engine_of

NAME = "benchmarks.host"
PLAIN, OURS, REFERENCE = "plain", "fullshard", "fsdp2"
PHASES = ("forward", "backward")
UNITS = ((1, True), (9, False), (6, True), (24, True))  # Linear layers, and whether with a bias
WIDTH, NUM_UNITS, NUM_WARM = 8, 16, 5
GOAL_US, GOAL_PARAMETER_US = 50.0, 5.0
COLUMNS = ("parameters a unit", "engine", "pass", "us a unit [95 %]", "goal, us", "within")
METHOD = (
    "One process is rank 0 of a fake world; no message is sent and none is played. A model of "
    f"{NUM_UNITS} equal units (Linear layers of {WIDTH} x {WIDTH}; those of 9 parameters have no "
    "biases) takes a step per round and engine, in turn.",
    "A figure is the processor time of the thread above that of the same step of the plain model "
    "in the same round, by units: the median over the rounds, with a 95 % bootstrap interval. What "
    "comes once a step (root, settling of gradients) is in it.",
    f"The goal is {GOAL_US:g} us and {GOAL_PARAMETER_US:g} us a parameter for a unit and pass.",
)


class Block(nn.Module):
    """Linear layers one after another, forming a unit."""

    def __init__(self, num_linears: int, width: int, *, bias: bool = True) -> None:
        super().__init__()
        layers = [nn.Linear(width, width, bias=bias) for _ in range(num_linears)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Stack(nn.Module):
    """Blocks one after another; forward returns a scalar."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def shard_ours(model: nn.Module, world: int) -> nn.Module:
    """Shards over a simulated world whose messages take no time."""
    fs.shard(model, transport="fake", shard=world, wrap=[Block.__name__])
    make_idle(engine_of(model))
    return model


def shard_fsdp2(model: Any, world: int) -> nn.Module:
    """torch's fully_shard on every block and the root, over the default process group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@contextmanager
def fake_group(world: int) -> Iterator[None]:
    """Sets a default process group whose collectives do nothing."""
    # A private name, in torch 2.8 to 2.13: there is no public group without peers.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to the calling thread, whose clock is read."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def step_us(model: nn.Module, x: torch.Tensor) -> tuple[float, float]:
    """Returns the processor microseconds of this thread for forward and for backward."""
    start = time.thread_time_ns()
    loss = model(x)
    middle = time.thread_time_ns()
    loss.backward()
    end = time.thread_time_ns()
    model.zero_grad()
    return (middle - start) / 1e3, (end - middle) / 1e3


def overheads_us(
    models: Mapping[str, nn.Module], x: torch.Tensor, num_rounds: int
) -> dict[str, list[list[float]]]:
    """Returns the overhead of forward and backward per model and round."""
    names = list(models)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for i in range(-NUM_WARM, num_rounds):
        if i == 0:
            gc.collect()
        turn = i % len(names)
        for name in names[turn:] + names[:turn]:
            found = step_us(models[name], x)
            if i >= 0:
                times[name].append(found)
    return {
        name: [
            [mine[at] - plain[at] for mine, plain in zip(times[name], times[PLAIN], strict=True)]
            for at in range(len(PHASES))
        ]
        for name in names
        if name != PLAIN
    }


def run(world: int, num_rounds: int, *, wait: bool, say: Say) -> dict[str, object]:
    """Measures all units; returns the rows and the other arguments of a Page."""
    rows: list[dict[str, object]] = []
    with Neighbours(wait=wait, say=say) as neighbours, one_thread(), fake_group(world):
        for num_linears, bias in UNITS:
            num_parameters = num_linears * (1 + bias)
            say(f"units of {num_parameters} parameters: {num_rounds} rounds")
            plain, ours, theirs = (
                Stack([Block(num_linears, WIDTH, bias=bias) for _ in range(NUM_UNITS)])
                for _ in range(3)
            )
            models = {
                PLAIN: plain,
                OURS: shard_ours(ours, world),
                REFERENCE: shard_fsdp2(theirs, world),
            }
            found = overheads_us(models, torch.ones(1, WIDTH), num_rounds)
            for name, phases in found.items():
                for phase, values in zip(PHASES, phases, strict=True):
                    host = median_of([value / NUM_UNITS for value in values])
                    rows.append(_row(name, phase, num_parameters, host, world))
    return {
        "rows": rows,
        "neighbours": neighbours,
    }


def _row(
    name: str, phase: str, num_parameters: int, host: Estimate, world: int
) -> dict[str, object]:
    goal = GOAL_US + GOAL_PARAMETER_US * num_parameters
    return {
        "name": name,
        "strategy": "full_shard",
        "pass": phase,
        "num_parameters": num_parameters,
        "num_units": NUM_UNITS,
        "world_size": world,
        "host_us": host.to_dict(),
        "goal_us": goal,
        "within_goal": host.value <= goal,
    }


def page_of(found: dict, command: str) -> Page:
    """Returns the page of the results of `run`."""
    cells = [
        (
            str(row["num_parameters"]),
            row["name"],
            row["pass"],
            "{value:.0f} [{low:.0f}, {high:.0f}]".format(**row["host_us"]),
            f"{row['goal_us']:.0f}",
            "yes" if row["within_goal"] else "NO",
        )
        for row in found["rows"]
    ]
    title = "Host time of a unit"
    return Page("host", title, command, columns=COLUMNS, cells=cells, method=METHOD, **found)


def main(
    world: Annotated[int, typer.Option(min=2, help="Simulated world size.")] = 64,
    rounds: Annotated[int, typer.Option(min=3, help="Timed steps per engine.")] = 61,
    wait: WaitFlag = False,
    out: OutFlag = None,
    as_json: JsonFlag = False,  # noqa: ARG001  read by run_script
) -> Outcome:
    """Measure the host time per unit in forward and backward, ours and FSDP2."""
    found = run(world, rounds, wait=wait, say=say)
    return show(page_of(found, command_line(NAME)), out)


if __name__ == "__main__":
    run_script(NAME)
