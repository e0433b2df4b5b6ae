"""`python -m benchmarks.overlap`: share of communication hidden by compute, per prefetch depth.

Ranks exchange messages over a simulated wire (`benchmarks/delay.py`). Its speed is chosen so that
a block's gather takes no longer than its forward.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.command import JsonFlag, command_line, run_script
from benchmarks.timeline import (
    LANES,
    Entry,
    OnWire,
    Slice,
    chrome_trace,
    hidden_share,
    slices_of,
)
from fullshard.bench.measurement import Neighbours, Page, Say, run_ranks
from fullshard.bench.step import Case
from fullshard.cli.bench import OutFlag, WaitFlag, say, show
from fullshard.cli.outcome import Outcome

NAME = "benchmarks.overlap"
MEASURE = "benchmarks.overlap_rank:measure"
# As deep as large models: nothing hides the first gather and the last reduction.
CASE = Case("overlap", width=256, layers=24, vocab=512, batch=2, seq=128, num_ranks=2)
DEPTHS = (0, 1, 2)
LANE = 26.0  # height of a lane of the drawing
UNDELAYED = "undelayed"
LATENCY_S = 50e-6
GOAL = 0.90
TRACED = 1  # the default depth
COLUMNS = (
    "prefetch depth",
    "forward: gathers hidden",
    "backward: gathers hidden",
    "backward: reductions hidden",
    "whole step hidden",
    "wire, ms a rank",
    "forward: compute per wire",
    "backward: compute per wire",
    "step, ms",
    "over undelayed, ms",
)
METHOD = (
    "Two gloo ranks with direct exchange, one thread each. Each message also takes latency + bytes "
    "/ bandwidth, asleep, on one wire for gathers and one for reductions. A step without delay at "
    "the start of each round gives the bandwidth: a block's gather takes as long as its forward "
    "(the lower quartile: neighbours only lengthen it), divided by --compute-per-wire.",
    "Hidden = 1 - time in which a rank waits for a message that is on the wire / time on the wire, "
    "over both ranks; medians over the rounds. One step of each depth a round, in turn.",
    "Depth 0 gathers a unit when it is needed. At any depth the first units' gathers and the last "
    "ones' reductions have no compute to hide behind. Compute per wire: over the busier one.",
    "Step times are a second witness: what waiting costs over the same step without delay.",
)


@dataclass(frozen=True)
class Job:
    """Settings of the ranks' measurement.

    Attributes:
        compute_per_wire: Time of a block's forward divided by that of its gather.
    """

    num_rounds: int = 11
    compute_per_wire: float = 1.1
    num_layers: int = CASE.layers
    depths: tuple[int, ...] = DEPTHS
    latency_s: float = LATENCY_S

    @property
    def case(self) -> Case:
        """Returns the model."""
        return replace(CASE, layers=self.num_layers)


@dataclass(frozen=True)
class Step:
    """One step of both ranks: slices by rank."""

    step_s: float
    ranks: tuple[tuple[Slice, ...], ...]

    def wire(self, *what: str, during: str = "") -> list[Slice]:
        """Returns the messages of all ranks."""
        pieces = [p for slices in self.ranks for p in slices if p.lane != "compute"]
        return [p for p in pieces if (not what or p.what in what) and during in ("", p.during)]

    def compute_per_wire(self, during: str) -> float:
        """Returns the ranks' compute time divided by the busy time of the busier wire."""
        computed = [p for slices in self.ranks for p in slices if p.what == during]
        lanes = ([p for p in self.wire(during=during) if p.lane == lane] for lane in LANES)
        return _total_ns(computed) / max(map(_total_ns, lanes))


def _total_ns(slices: Iterable[Slice]) -> int:
    return sum(piece.stop_ns - piece.start_ns for piece in slices)


def steps_of(results: Sequence[dict[str, Any]], label: str) -> list[Step]:
    """Reads the rounds that the ranks recorded under a label."""
    steps = []
    for rounds in zip(*(result["rounds"][label] for result in results), strict=True):
        slices = tuple(
            tuple(slices_of([Entry(*e) for e in r["entries"]], [OnWire(*m) for m in r["messages"]]))
            for r in rounds
        )
        steps.append(Step(rounds[0]["step_s"], slices))
    return steps


def _row(depth: int, steps: Sequence[Step], undelayed: Sequence[Step]) -> dict[str, Any]:
    def typical(figure: Callable[[Step], float | None]) -> float | None:
        found = [value for value in map(figure, steps) if value is not None]
        return median(found) if found else None

    extra = [step.step_s - other.step_s for step, other in zip(steps, undelayed, strict=True)]
    return {
        "prefetch_depth": depth,
        "hidden_forward": typical(lambda s: hidden_share(s.wire(during="forward"))),
        "hidden_backward": typical(lambda s: hidden_share(s.wire(during="backward"))),
        "hidden_backward_gathers": typical(
            lambda s: hidden_share(s.wire("gather", during="backward"))
        ),
        "hidden_backward_reductions": typical(lambda s: hidden_share(s.wire("reduce", "settle"))),
        "hidden": typical(lambda s: hidden_share(s.wire())),
        "wire_s": typical(lambda s: _total_ns(s.wire()) / len(s.ranks) / 1e9),
        "compute_per_wire_forward": typical(lambda s: s.compute_per_wire("forward")),
        "compute_per_wire_backward": typical(lambda s: s.compute_per_wire("backward")),
        "step_s": typical(lambda s: s.step_s),
        "over_undelayed_s": median(extra),
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    shares = ("hidden_forward", "hidden_backward_gathers", "hidden_backward_reductions", "hidden")
    times = ("wire_s", "step_s", "over_undelayed_s")
    wire, step, over = (f"{row[key] * 1e3:.1f}" for key in times)
    ratios = (f"{row[f'compute_per_wire_{during}']:.2f}" for during in ("forward", "backward"))
    hidden = (f"{row[key]:.3f}" for key in shares)
    return (str(row["prefetch_depth"]), *hidden, wire, *ratios, step, over)


def run(job: Job, *, command: str, timeout_s: float, wait: bool, say: Say) -> Page:
    """Measures every depth and returns the page, with one step's trace among its files."""
    say(f"{job.case.describe()}: {job.num_rounds} rounds of prefetch depths {job.depths}")
    with Neighbours(wait=wait, say=say) as neighbours:
        results = run_ranks(
            MEASURE,
            job,
            job.case.num_ranks,
            what="bench overlap: the ranks",
            timeout_s=timeout_s,
        )
    undelayed = steps_of(results, UNDELAYED)
    found = {depth: steps_of(results, str(depth)) for depth in job.depths}
    rows = [_row(depth, steps, undelayed) for depth, steps in found.items()]
    best = max(rows, key=lambda row: row["hidden"])
    speed = results[0]["bytes_per_s"]
    outer = median(result["outer_hidden"] for result in results)
    notes = [
        f"Best: depth {best['prefetch_depth']} hides {best['hidden']:.1%} of the time on the wires "
        f"(goal {GOAL:.0%}).",
        f"Wires: {job.latency_s * 1e6:.0f} us + bytes / {speed / 1e6:.0f} MB/s each. A step "
        f"without delay: {median(s.step_s for s in undelayed) * 1e3:.1f} ms.",
        f"Sums over replicas (no_shard, the same wire): {outer:.1%} hidden.",
    ]
    return Page(
        name="overlap",
        title="Time on the wire that is hidden behind compute",
        command=command,
        rows=rows,
        columns=COLUMNS,
        cells=[_cells(row) for row in rows],
        method=METHOD,
        neighbours=neighbours,
        notes=[job.case.describe() + ".", *notes],
        drawings=_drawings(_trace(found[TRACED], results[0]["titles"])),
    )


def _drawings(trace: dict[str, Any]) -> dict[str, str]:
    text = json.dumps(trace, separators=(",", ":")) + "\n"
    return {"overlap_trace.json": text, "overlap.svg": draw_trace(trace)}


def _trace(steps: Sequence[Step], titles: Sequence[str]) -> dict[str, Any]:
    """Returns the step with the median hidden share, for Chrome and Perfetto."""
    step = sorted(steps, key=lambda step: hidden_share(step.wire()) or 0.0)[len(steps) // 2]
    about = {
        "prefetch_depth": TRACED,
        "hidden": hidden_share(step.wire()),
        "hidden_forward": hidden_share(step.wire(during="forward")),
        "hidden_backward": hidden_share(step.wire(during="backward")),
    }
    return chrome_trace(step.ranks, titles, about)


def main(  # noqa: PLR0913  (one parameter an option)
    layers: Annotated[int, typer.Option(min=3, help="Number of blocks.")] = 24,
    compute_per_wire: Annotated[
        float, typer.Option(min=0.01, help="Time of a block's forward over that of its gather.")
    ] = 1.1,
    rounds: Annotated[int, typer.Option(min=3, help="Timed steps per depth.")] = 11,
    timeout: Annotated[float, typer.Option(help="Time limit for all ranks, s.")] = 1800.0,
    wait: WaitFlag = False,
    out: OutFlag = None,
    as_json: JsonFlag = False,  # noqa: ARG001  read by run_script
) -> Outcome:
    """Measure the share of slow communication hidden by compute, per prefetch depth."""
    job = Job(rounds, compute_per_wire, layers)
    command = command_line(NAME)
    return show(run(job, command=command, timeout_s=timeout, wait=wait, say=say), out)


STYLE = """\
svg { font-family: system-ui, sans-serif; background: #fff; }
text { fill: #475467; font-size: 12px; } .title { fill: #101828; font-size: 14px; }
.compute { fill: #98a2b3; } .backward { fill: #2563eb; } .forward { fill: #60a5fa; }
.gather { fill: #059669; } .reduce { fill: #d97706; } .wait { fill: #f04438; }
"""
WIDTH, LEFT = 960.0, 150.0


def text_at(x: float, y: float, words: str, kind: str = "") -> str:
    """Returns text at a place."""
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def bar_at(kind: str, x: float, y: float, width: float, height: float, words: str) -> str:
    """Returns a bar of a class of STYLE, with its text as a tooltip."""
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.4):.1f}" '
        f'height="{height:g}"><title>{escape(words)}</title></rect>'
    )


def draw_trace(trace: Mapping[str, Any]) -> str:
    """Draws lanes of what each rank computes, gathers and reduces in one step.

    Args:
        trace: A Chrome trace: named processes and threads, complete events in microseconds.
    """
    events = trace["traceEvents"]
    ranks = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    named = [e for e in events if e["name"] == "thread_name"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in named}
    bars = [e for e in events if e["ph"] == "X"]
    start = min(e["ts"] for e in bars)
    span = max(e["ts"] + e["dur"] for e in bars) - start
    scale = (WIDTH - LEFT - 10) / span
    rows = {key: 34 + LANE * at + 8 * key[0] for at, key in enumerate(sorted(lanes))}
    hidden = trace["otherData"]["hidden"]
    parts = [
        text_at(
            0, 16, f"One step over {span / 1e3:.0f} ms: {hidden:.1%} of the wire hidden", "title"
        )
    ]
    for key, y in rows.items():
        parts.append(text_at(0, y + 14, f"{ranks[key[0]]}, {lanes[key]}"))
    for event in bars:
        key = (event["pid"], event["tid"])
        kind = event["cat"] if lanes[key] == "compute" else lanes[key]
        words = f"{event['name']}: {event['dur'] / 1e3:.2f} ms"
        x = LEFT + (event["ts"] - start) * scale
        parts.append(bar_at(kind, x, rows[key], event["dur"] * scale, LANE - 6, words))
    bottom = max(rows.values()) + LANE + 20
    for at, (kind, words) in enumerate(
        {
            "forward": "forward",
            "backward": "backward",
            "wait": "waiting for the wire",
            "gather": "gather",
            "reduce": "reduce",
        }.items()
    ):
        x = LEFT + 160 * at
        parts += [bar_at(kind, x, bottom - 10, 12, 12, words), text_at(x + 18, bottom, words)]
    head = f'<svg viewBox="-8 0 {WIDTH + 8:g} {bottom + 10:g}" role="img" '
    head += 'xmlns="http://www.w3.org/2000/svg">'
    return "".join([head, f"<style>\n{STYLE}</style>", *parts, "</svg>\n"])


if __name__ == "__main__":
    run_script(NAME)
