"""`python -m benchmarks.scale`: planning and bookkeeping time of one rank, by world size."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from math import log2
from statistics import median
from typing import Annotated

import torch
import typer

from benchmarks.command import JsonFlag, command_line, run_script
from benchmarks.host import PLAIN, Block, Stack, one_thread, overheads_us, shard_ours
from benchmarks.scale_saves import (
    GROUPS,
    HYBRID,
    MANIFEST,
    RECORD,
    RESUME,
    groups_us,
    saves_us,
)
from benchmarks.svg_lines import Axes, svg_lines
from fullshard.bench.measurement import Neighbours, Page, Say, bootstrap, median_of
from fullshard.cli.bench import OutFlag, WaitFlag, say, show
from fullshard.cli.outcome import Outcome
from fullshard.config.schema import ShardConfig
from fullshard.engine.engine import engine_of
from fullshard.engine.model_spec import meta_model, spec_of
from fullshard.errors import ConfigError
from fullshard.planner.mesh import Topology
from fullshard.planner.plan import make_plan

NAME = "benchmarks.scale"
WORLDS = (8, 64, 512, 4096, 16384)
LOCAL_WORLD_SIZE = 8
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
# Units whose flat buffers have the same length in every world up to LARGEST: none is padded.
NUM_UNITS, NUM_LINEARS, WIDTH = 8, 4, 512
LARGEST = NUM_LINEARS * WIDTH**2 // 64
PLANNING, BOOKKEEPING = "planning", "bookkeeping"
ORDER = "order agreement"
ONCE = (GROUPS, HYBRID, ORDER, RECORD, MANIFEST, RESUME)
ROOM = 1.6  # top of the plot, so that the legend is above the lines
COLUMNS = (
    *("ranks", "planning, ms", "to the first", "bookkeeping, us a unit", "to the first"),
    *("groups (hybrid)", "groups, ms (hybrid)", "order: messages, bytes", "us"),
    *("a rank's record, KiB", "ms"),
    *("manifest, MiB", "joined by rank 0, s", "resume decision, s"),
)
METHOD = (
    "Planning: processor time of make_plan and of one rank's view of it, for a Llama of 8B "
    "parameters on meta, full_shard over all ranks.",
    f"Bookkeeping: processor time of forward and backward above the plain model's, by units, of "
    f"rank 0 of a fake world ({NUM_UNITS} units of {NUM_LINEARS} weights whose buffers are equally "
    "long in every world; no message is sent and none is played).",
    "Groups: process groups that rank 0 creates under full_shard and, in brackets, hybrid_shard "
    f"over hosts of {LOCAL_WORLD_SIZE}, and its processor time, with a process group that sends "
    "nothing. Order: the all-reduces in which ranks agree on the order of units, once after the "
    "first step, their bytes and the processor time of a rank.",
    "Saves: the same Llama with AdamW's states, sharded over all ranks, through the code of a real "
    "save in a local folder, with empty files. Record: what a rank tells rank 0. Joined: rank 0's "
    "processor time from the last note to the commit. Resume decision: the processor time of "
    "finding, parsing and checking COMPLETE.json and index.json, which every rank that loads does. "
    "Measured once.",
    "All worlds take one turn a round; medians over the rounds with a 95 % bootstrap interval.",
)
STYLE = """\
svg { font-family: system-ui, sans-serif; background: #fff; }
.grid { stroke: #e4e7ec; fill: none; } .axis { stroke: #667085; fill: none; }
.tick { fill: #667085; font-size: 11px; } .series { fill: none; stroke-width: 2; }
.c1 { stroke: #2563eb; } .c2 { stroke: #d97706; } .c3 { stroke: #059669; } .c4 { stroke: #7c3aed; }
.dot { fill: #fff; stroke-width: 2; }
"""


def check(worlds: Sequence[int]) -> None:
    """Refuses worlds that do not divide the buffer into equal parts.

    Raises:
        ConfigError: such a world.
    """
    for world in worlds:
        if world < 1 or LARGEST % world:
            nearest = min((2**i for i in range(LARGEST.bit_length())), key=lambda n: abs(n - world))
            raise ConfigError(
                f"world: expected a power of two up to {LARGEST}, got {world}. "
                f"The nearest is {nearest}."
            )


def planning_us(worlds: Sequence[int], num_rounds: int) -> dict[int, list[float]]:
    """Returns the planning time by world and round."""
    spec = spec_of(meta_model(LLAMA_8B))
    config = ShardConfig.of(None)
    times: dict[int, list[float]] = {world: [] for world in worlds}
    for i in range(-1, num_rounds):
        for world in worlds:
            start = time.thread_time_ns()
            make_plan(spec, config, Topology(world, min(world, LOCAL_WORLD_SIZE))).view(world - 1)
            if i >= 0:
                times[world].append((time.thread_time_ns() - start) / 1e3)
    return times


def bookkeeping_us(worlds: Sequence[int], num_rounds: int) -> dict[int, list[float]]:
    """Returns the overhead of a step per unit, by world and round."""

    def model() -> Stack:
        return Stack([Block(NUM_LINEARS, WIDTH, bias=False) for _ in range(NUM_UNITS)])

    models = {str(world): shard_ours(model(), world) for world in worlds}
    found = overheads_us({PLAIN: model(), **models}, torch.ones(1, WIDTH), num_rounds)
    return {
        world: [sum(both) / NUM_UNITS for both in zip(*found[str(world)], strict=True)]
        for world in worlds
    }


def order_us(worlds: Sequence[int]) -> Iterator[tuple[str, int, float, tuple[int, int]]]:
    """Yields (name, world, us, (messages, bytes)) of the order agreement after the first step."""
    x = torch.ones(1, WIDTH)
    for world in worlds:
        blocks = [Block(NUM_LINEARS, WIDTH, bias=False) for _ in range(NUM_UNITS)]
        engine = engine_of(model := shard_ours(Stack(blocks), world))
        sent: list[int] = []
        send = engine.norms.transport.all_reduce

        def counted(values: torch.Tensor, *, maximum: bool = False) -> None:
            sent.append(values.nbytes)  # noqa: B023  (called at once)
            send(values, maximum=maximum)  # noqa: B023

        model(x).backward()
        engine.norms.transport.all_reduce = counted  # type: ignore[method-assign]
        start = time.thread_time_ns()
        engine._agree_on_order()
        spent = (time.thread_time_ns() - start) / 1e3
        assert engine.runtime.agreed
        yield ORDER, world, spent, (len(sent), sum(sent))


def run(worlds: Sequence[int], num_rounds: int, *, wait: bool, say: Say) -> dict[str, object]:
    """Measures both; returns the rows and the other arguments of a Page.

    Raises:
        ConfigError: transformers, whose Llama is planned, is not installed.
    """
    rows = []
    with Neighbours(wait=wait, say=say) as neighbours, one_thread():
        for name, measure in ((PLANNING, planning_us), (BOOKKEEPING, bookkeeping_us)):
            say(f"{name}: {num_rounds} rounds of {', '.join(map(str, worlds))} ranks")
            rows += rows_of(name, measure(worlds, num_rounds))
        say(f"groups and saves of {', '.join(map(str, worlds))} ranks, once")
        once = [*groups_us(worlds, LOCAL_WORLD_SIZE), *order_us(worlds), *_saves(worlds)]
        columns = ("name", "world_size", "cpu_us", "count")
        rows += [dict(zip(columns, row, strict=True)) for row in once]
    return {
        "rows": rows,
        "neighbours": neighbours,
    }


def _saves(worlds: Sequence[int]) -> Iterator[tuple[str, int, float, int]]:
    spec, config = spec_of(meta_model(LLAMA_8B)), ShardConfig.of(None)
    for world in worlds:
        plan = make_plan(spec, config, Topology(world, min(world, LOCAL_WORLD_SIZE)))
        yield from saves_us(plan, world)


def rows_of(name: str, times: dict[int, list[float]]) -> list[dict[str, object]]:
    """Returns one row per world, each compared with the first."""
    first = next(iter(times.values()))
    return [
        {
            "name": name,
            "world_size": world,
            "time_us": median_of(values).to_dict(),
            "ratio_to_first": bootstrap(
                len(values),
                lambda rounds, values=values: (
                    median(values[i] for i in rounds) / median(first[i] for i in rounds)
                ),
            ).to_dict(),
            "num_rounds": len(values),
        }
        for world, values in times.items()
    ]


def plot(rows: Sequence[dict]) -> str:
    """Returns both by world size as an SVG file."""
    ratios: dict[str, list[float]] = {PLANNING: [], BOOKKEEPING: []}
    for row in rows:
        if row["name"] in ratios:
            ratios[row["name"]].append(row["ratio_to_first"]["value"])
    exponents = [row["world_size"].bit_length() - 1 for row in rows if row["name"] == PLANNING]
    top = max(ROOM, *(1.06 * value for values in ratios.values() for value in values))
    axes = Axes(
        "cost of one rank, relative to the first",
        STYLE,
        x_label="ranks, as a power of two",
        xs=exponents,
        y_range=(0.0, top),
        width=720.0,
        has_dots=True,
    )
    return svg_lines(ratios, axes)


def plot_saves(rows: Sequence[dict]) -> str:
    """Returns the growth of records, manifest and resume decision as an SVG file."""
    rows = [row for row in rows if row["name"] in (RECORD, MANIFEST, RESUME)]
    lines = {
        "a rank's record, bytes": [row["count"] for row in rows if row["name"] == RECORD],
        "manifest, bytes": [row["count"] for row in rows if row["name"] == MANIFEST],
        "joining it, time": [row["cpu_us"] for row in rows if row["name"] == MANIFEST],
        "resume decision, time": [row["cpu_us"] for row in rows if row["name"] == RESUME],
    }
    axes = Axes(
        "doublings since the first world",
        STYLE,
        x_label="ranks, as a power of two",
        xs=[row["world_size"].bit_length() - 1 for row in rows if row["name"] == RECORD],
        y_range=(-2.0, 15.0),
        width=720.0,
        has_dots=True,
    )
    logs = {name: [log2(one / line[0]) for one in line] for name, line in lines.items()}
    return svg_lines(logs, axes)


def page_of(found: dict, command: str) -> Page:
    """Returns the page of the results of `run`, with the plot."""
    by_world: dict[int, list[str]] = {}
    once = {(row["name"], row["world_size"]): row for row in found["rows"] if "count" in row}
    for row in (row for row in found["rows"] if "time_us" in row):
        scale, digits = (1e3, 1) if row["name"] == PLANNING else (1.0, 0)
        ratio = "{value:.2f} [{low:.2f}, {high:.2f}]".format(**row["ratio_to_first"])
        cells = by_world.setdefault(row["world_size"], [str(row["world_size"])])
        cells += [f"{row['time_us']['value'] / scale:.{digits}f}", ratio]
    for world, cells in by_world.items():
        groups, hybrid, order, record, manifest, resume = (once[name, world] for name in ONCE)
        cells += [
            f"{groups['count']} ({hybrid['count']:,})",
            f"{groups['cpu_us'] / 1e3:.1f} ({hybrid['cpu_us'] / 1e3:.1f})",
            "{} of {}".format(*order["count"]),
            f"{order['cpu_us']:.0f}",
            f"{record['count'] / 1024:.0f}",
            f"{record['cpu_us'] / 1e3:.1f}",
            f"{manifest['count'] / 2**20:.1f}",
            f"{manifest['cpu_us'] / 1e6:.2f}",
            f"{resume['cpu_us'] / 1e6:.2f}",
        ]
    return Page(
        "scale",
        "Cost of one rank over the world size",
        command,
        columns=COLUMNS,
        cells=list(by_world.values()),
        method=METHOD,
        drawings={
            "scale.svg": plot(found["rows"]),
            "scale_saves.svg": plot_saves(found["rows"]),
        },
        **found,
    )


def main(
    world: Annotated[
        list[int] | None, typer.Option(help="World size; repeatable. Default: 8 to 16,384.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=3, help="Measured rounds.")] = 21,
    wait: WaitFlag = False,
    out: OutFlag = None,
    as_json: JsonFlag = False,  # noqa: ARG001  read by run_script
) -> Outcome:
    """Measure planning and bookkeeping time of one rank by world size."""
    worlds = world or WORLDS
    check(worlds)
    found = run(worlds, rounds, wait=wait, say=say)
    return show(page_of(found, command_line(NAME)), out)


if __name__ == "__main__":
    run_script(NAME)
