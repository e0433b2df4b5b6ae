"""Streams are simulated on a CPU: no race remains, and each wait is needed."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fullshard as fs
from fullshard import engine, transport
from support.grid import marked
from support.mutants import Mutant, calls_of
from support.streams import DEFAULT, SIDE, Played

WIDTH = 136  # the smallest model with large gradients, which are moved as soon as they are ready


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(self.norm(x))
        self.aside = up.square().mean()
        return x + self.down(torch.relu(up))


class Chain(nn.Module):
    """Equal blocks; forward skips the block `left_out`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.left_out, self.again = 9, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for at in (0, 2):
            x = (
                checkpoint(self.pair, at, x, use_reentrant=False)
                if self.again
                else self.pair(at, x)
            )
        return x.square().mean()

    def pair(self, at: int, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[at : at + 2]:
            x = x if block in self.blocks[self.left_out :][:1] else block(x)
        return x


class Twice(Chain):
    """Each block runs twice, so that it has its own slot once the order is learned."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return x.square().mean()


class Tower(nn.Module):
    """An embedding tied to the head, a frozen block, and a loss on an attribute of each block."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.table.weight
        self.blocks[1].requires_grad_(False)
        self.again = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table((x[:, :5] * 10).long().abs() % WIDTH)
        sides = []
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
            sides.append(block.aside)
        return self.head(x).square().mean() + 0.1 * torch.stack(sides).sum()


@dataclass(frozen=True)
class Trial:
    """A model to train on the simulated device.

    Attributes:
        settings: Keyword arguments of fs.shard.
        build: Builds the model.
        stream: Stream of training; sharding uses the default one.
        sync: no_sync around the first micro-batch: "", "all" or "outer".
        again: Whether blocks are recomputed.
    """

    settings: dict[str, Any]
    build: Callable[[], Any] = Chain
    stream: str = DEFAULT
    sync: str = ""
    again: bool = False
    do: Callable[[Trial, Any, Any], None] = field(default=lambda trial, model, played: None)

    def __str__(self) -> str:
        told = [f"{k}={v}" for k, v in self.settings.items()]
        return " ".join([self.build.__name__, *told, self.stream, self.sync, "again" * self.again])

    def run(self) -> Played:
        """Trains two steps, then calls `do`."""
        torch.manual_seed(0)
        with Played().device() as played:
            model = self.build()
            model.again = self.again
            fs.shard(model, transport="fake", wrap=["Block"], **self.settings)
            played.watch(model)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
            with played.on(self.stream), played:
                for _ in range(2):
                    self.step(model, optimizer)
                self.do(self, model, played)
            for stream in list(played.clocks):  # before the model is freed
                played.join(DEFAULT, stream)
        return played

    def step(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        around = nullcontext()
        if self.sync:
            around = fs.no_sync(model, outer_only=self.sync == "outer")
        with around:
            model(torch.randn(3, WIDTH)).backward()
        if self.sync:
            model(torch.randn(3, WIDTH)).backward()
        fs.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()


MESHES = {
    "full_shard": {"shard": 4},
    "shard_grad_op": {"shard": 4},
    "no_shard": {"replicate": 4},
    "hybrid_shard": {"shard": 2, "replicate": 2},
    "hybrid_shard_zero2": {"shard": 2, "replicate": 2},
}
FULL = {"strategy": "full_shard", "shard": 4}
HYBRID = {"strategy": "hybrid_shard", **MESHES["hybrid_shard"]}
CHOICES = list(
    product(
        ("", "all", "outer"),
        (False, True),
        MESHES,
        ("native", "ordered"),
        (False, True),
        (Chain, Tower),
        (DEFAULT, SIDE),
        (False, True),
        (1, 2),
    )
)
# Of the strides tried, this one covers every pair of choices with the fewest trials.
CHOSEN = [CHOICES[at * 583 % len(CHOICES)] for at in range(37)]
NUM_SHORT = 18
GRID = [
    Trial(
        {
            "strategy": strategy,
            **MESHES[strategy],
            "reduction": reduction,
            **({"offload": "cpu"} if offload else {}),
            **({"param_dtype": "bf16", "reduce_dtype": "bf16"} if is_bf16 else {}),
            "forward_prefetch": depth,
        },
        build,
        stream,
        sync,
        again,
    )
    for sync, again, strategy, reduction, offload, build, stream, is_bf16, depth in CHOSEN
]


def test_the_short_trials_cover_every_pair_of_choices():
    def pairs(trials):
        return {pair for chosen in trials for pair in combinations(enumerate(chosen), 2)}

    assert pairs(CHOSEN[:NUM_SHORT]) == pairs(CHOICES)


@pytest.mark.parametrize(
    "trial", marked(zip(GRID), lambda trial: trial in GRID[:NUM_SHORT], pytest.mark.long), ids=str
)
def test_no_memory_is_accessed_too_early(trial):
    played = trial.run()
    assert played.num_accesses > 1000
    assert not played.races


def test_nvtx_shows_every_event_of_a_step(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("its end"))
    streams = transport.streams.of(torch.device("cuda", 0))
    streams.begin_range("a unit")
    streams.end_range()
    assert calls == ["a unit", "its end"]
    played = Trial(FULL).run()
    step = played.ranges[len(played.ranges) // 2 :]
    assert step.count("fullshard forward blocks.3") == 1
    kinds = ("gather", "forward", "release", "backward", "reduce", "accumulate")
    assert {f"fullshard {kind} blocks.1" for kind in kinds} < set(step)
    assert step[-1] == "fullshard settle"
    assert played.num_open == 0


def test_nvtx_ranges_end_where_backward_raises():
    played = Trial(FULL, do=raises_in_backward).run()
    assert not any(name.startswith(" ") for name in played.ranges)
    assert played.num_open == 0


# ---- other uses of a model


def on_other_streams(trial, model, played):
    """Two forwards on separate streams, their backwards called from a third."""
    losses = []
    for stream in ("one", "two"):
        played.join(stream, played.now)
        with played.on(stream):
            losses.append(model(torch.randn(3, WIDTH)))
    for stream, loss in zip(("one", "two"), losses, strict=True):
        with played.backward_from("three", stream):
            loss.backward()
    played.join("three", "two")
    with played.on("three"):
        [p.grad.to_local().clone() for p in model.parameters()]


def evaluates(trial, model, played):
    with torch.no_grad():
        model(torch.randn(3, WIDTH))
    model(torch.randn(3, WIDTH)).backward()


def updates_after_an_evaluation(trial, model, played):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(3, WIDTH)).backward()
    with torch.no_grad():
        model(torch.randn(3, WIDTH))
    optimizer.step()


def leaves_out_a_block(trial, model, played):
    model.left_out = 3
    model(torch.randn(3, WIDTH)).backward()
    with torch.no_grad():
        model(torch.randn(3, WIDTH))


def raises_in_backward(trial, model, played):
    raised = model.blocks[1].register_forward_hook(
        lambda *told: told[2].register_hook(lambda _: 1 / 0) and None
    )
    with pytest.raises(ZeroDivisionError):
        model(torch.randn(3, WIDTH)).backward()
    raised.remove()
    model(torch.randn(3, WIDTH)).backward()


def differentiates_inside_backward(trial, model, played):
    x = torch.randn(3, WIDTH, requires_grad=True)
    kept = model.blocks[3](x)

    def inner(gradient):
        return gradient + torch.autograd.grad(kept, x, gradient)[0]

    model.blocks[1].register_forward_hook(lambda *told: told[2].register_hook(inner) and None)
    model(torch.randn(3, WIDTH)).backward()


def reads_whole_tensors(trial, model, played):
    model(torch.randn(3, WIDTH)).backward()
    for param in model.parameters():
        param.full_tensor().sum()
        param.grad.full_tensor().sum()
    with fs.unsharded(model):
        sum(p.sum() for p in model.parameters())


def updates_by_owner(trial, model, played):
    optimizer = fs.owned(model, partial(torch.optim.SGD, lr=0.1, momentum=0.9), model.parameters())
    for _ in range(2):
        model(torch.randn(3, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()


def trains_beside_another_model(trial, model, played):
    """A teacher, then another model in the same backward; both were sharded on another stream."""
    with played.on(DEFAULT):
        others = [
            fs.shard(Chain().requires_grad_(is_trained), transport="fake", wrap=["Block"], **FULL)
            for is_trained in (False, True)
        ]
    for other in others:
        played.watch(other)
        played.join(played.now, DEFAULT)
        x = torch.randn(3, WIDTH)
        with torch.no_grad() if other is others[0] else nullcontext():
            wanted = other(x)
        (model(x) - wanted).square().backward()
        fs.clip_grad_norm_(model, 1.0)


def learns_another_order(trial, model, played):
    """Frees slots that a different stream has read than the one that made them."""
    with played.on(DEFAULT):
        other = fs.shard(Twice(), transport="fake", wrap=["Block"], **FULL)
    played.watch(other)
    played.join(played.now, DEFAULT)
    other(torch.randn(3, WIDTH)).backward()
    with torch.no_grad():  # this prefetches a unit that is never entered
        other.blocks[1](torch.randn(3, WIDTH))
    other(torch.randn(3, WIDTH)).backward()


class Towers(Chain):
    """Two towers of two blocks, the second on another stream."""

    streams: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right, here = x, x, self.streams.now
        self.streams.join("aside", here)
        for at in range(2):
            left = self.blocks[at](left)
            with self.streams.on("aside"):
                right = self.blocks[2 + at](right)
        self.streams.join(here, "aside")
        self.streams.keep(right, here)
        return (left + right).square().mean()


def computes_on_two_streams(trial, model, played):
    towers = Towers()
    towers.streams = played
    fs.shard(towers, transport="fake", wrap=["Block"], **trial.settings)
    played.watch(towers)
    with torch.no_grad():
        for _ in range(2):
            towers(torch.randn(3, WIDTH))


def waits_on_another_stream(trial, model, played):
    """Waiting gradients were made on one stream, and are reduced on another."""
    for outer_only in (False, True):
        with fs.no_sync(model, outer_only=outer_only):
            model(torch.randn(3, WIDTH)).backward()
        played.join(SIDE, played.now)
        with played.on(SIDE):
            model(torch.randn(3, WIDTH)).backward()
        played.join(played.now, SIDE)


def defers_and_leaves_out_a_block(trial, model, played):
    """Peers wait for the block, whose gather starts late because weights are on disk."""
    model.left_out = 3
    with fs.no_sync(model):
        model(torch.randn(3, WIDTH)).backward()
    evaluates(trial, model, played)
    model.left_out = 9
    on_other_streams(trial, model, played)


class Aside(Block):
    """A backward hook differentiates the unit's first results on another stream."""

    streams: Any = None
    held: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.detach().requires_grad_()
        kept, out, streams = super().forward(y), super().forward(x), self.streams

        def differentiate(_: torch.Tensor) -> None:
            streams.join("aside", streams.now)
            with streams.on("aside"):
                torch.autograd.grad(kept, y, torch.ones_like(kept), retain_graph=True)

        out.register_hook(differentiate)
        self.held.append(kept)
        return out


def differentiates_on_another_stream(trial, model, played):
    """A prefetched unit is first read there."""
    Aside.streams, Aside.held = played, []
    for block in model.blocks:
        block.__class__ = Aside
    model(torch.randn(3, WIDTH)).backward()
    played.join(played.now, "aside")
    Aside.held.clear()


def updates_on_other_streams(trial, model, played):
    """Forward, backward and optimizer each run on a different stream."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(2):
        on_other_streams(trial, model, played)
        played.join(SIDE, "three")
        with played.on(SIDE):
            optimizer.step()
            optimizer.zero_grad()
        played.join(played.now, SIDE)


# Without gradients on disk: the host waits for their copies, and a CPU copies differently.
ON_DISK = {"parameters": "nvme", "gradients": "cpu", "optimizer": "nvme"}
OTHERS = [
    Trial(FULL, do=on_other_streams),
    Trial(HYBRID, do=on_other_streams, stream=SIDE),
    Trial(FULL | {"poison": True}, do=evaluates),
    Trial(FULL | {"forward_prefetch": 2, "poison": True}, do=leaves_out_a_block),
    Trial(FULL | {"offload": "cpu"}, do=updates_after_an_evaluation),
    Trial(FULL, do=raises_in_backward),
    Trial(FULL, do=differentiates_inside_backward),
    Trial(FULL, do=differentiates_on_another_stream),
    Trial(FULL, do=reads_whole_tensors),
    Trial(FULL, do=updates_by_owner, stream=SIDE),
    Trial(FULL, do=learns_another_order, stream=SIDE),
    Trial(HYBRID, do=waits_on_another_stream),
    Trial(FULL | {"poison": True}, do=computes_on_two_streams),
    Trial(FULL | {"offload": "cpu"}, do=trains_beside_another_model, stream=SIDE),
    Trial(FULL | {"offload": ON_DISK}, do=defers_and_leaves_out_a_block, stream=SIDE),
    Trial(HYBRID | {"offload": ON_DISK}, do=updates_on_other_streams, again=True),
]


@pytest.mark.parametrize("trial", OTHERS, ids=lambda trial: trial.do.__name__)
def test_no_memory_is_accessed_too_early_when_a_model(trial):
    assert not trial.run().races


# ---- each wait is needed

# Waits of CPU ranks for messages and disks, and methods that are only named like waits.
NO_WAITS = ("Works(works, own).wait", "norms.keep", "owned.join")
WAITS = [
    mutant
    for package in (engine, transport)
    for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
    if not found.name.endswith((".shared", ".segment", "transport.streams", "engine.disk"))
    for mutant in calls_of(
        importlib.import_module(found.name), ("wait", "join", "keep", "finish", "await_host")
    )
    if not any(other in mutant.text for other in NO_WAITS)
    and not mutant.function.startswith("DirectTransport")
]
SHORT = [
    Trial(FULL),
    Trial(FULL, stream=SIDE),
    Trial(HYBRID | {"reduction": "ordered"}, again=True),
    Trial(HYBRID | {"param_dtype": "bf16"}, stream=SIDE),
    Trial({"strategy": "no_shard", "replicate": 4, "offload": "cpu"}),
    *OTHERS,
]
# Trials to run first for a mutant, by words of both; all others follow.
FIRST = {
    "gather_piece|gather_master": "reads_whole_tensors",
    "_agree_on_order|_switch_to": "learns_another_order",
    "GradientNorms|_on_the_steps|_begin_step.*join|on_gradient": "on_other_streams",
    "_begin_step.*keep": "waits_on_another_stream",
    "_gather: fetch": "updates_after_an_evaluation",
    "OffloadedActions|_finish_landing": "no_shard",
    "sum_replicas|Runtime.enter:": "hybrid_shard",
    "Exchange": "updates_by_owner",
    "": "leaves_out_a_block|differentiates_inside_backward",
}


def test_one_file_calls_streams_and_events():
    """Calls elsewhere would not be simulated; unlocking pages waits for the device."""
    calls = re.compile(
        r"cuda\.(Stream|Event|stream|current_stream|synchronize)\b|_stream\(|_event\("
    )
    found = {
        path.name: calls.findall(path.read_text(encoding="utf-8"))
        for package in (engine, transport)
        for path in Path(package.__path__[0]).rglob("*.py")
    }
    assert found.pop("streams.py")
    assert {name: calls for name, calls in found.items() if calls} == {"homes.py": ["synchronize"]}


def is_caught(mutant: Mutant) -> bool:
    first = next(words for waits, words in FIRST.items() if re.search(waits, str(mutant)))
    trials = sorted(SHORT, key=lambda trial: not re.search(first, f"{trial} {trial.do.__name__}"))
    with mutant.alive():
        return any(trial.run().races for trial in trials)


def test_the_list_of_waits_is_complete():
    assert len(WAITS) == 31, WAITS


@pytest.mark.parametrize("mutant", WAITS, ids=str)
def test_removing_a_wait_is_detected(mutant):
    assert is_caught(mutant)
