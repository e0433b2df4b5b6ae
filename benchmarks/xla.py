"""`python -m benchmarks.xla`: the JAX engine on two gloo processes and two alternatives.

fullshard     two processes under shard_map: gathers and reductions of the plan
auto          two processes, equally sharded arrays under jit: XLA's partitioner places collectives
one process   the first process with its own batch, nothing sharded; the other one waits

The first two gather blocks once per pass (full_shard) or once per step (shard_grad_op).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from statistics import fmean, median
from typing import Annotated, Any

import typer

from benchmarks.command import JsonFlag, command_line, run_script
from fullshard.bench.measurement import (
    Estimate,
    Neighbours,
    Page,
    Say,
    largest_difference,
    paired_ratio,
    run_ranks,
)
from fullshard.cli.bench import OutFlag, WaitFlag, say, show
from fullshard.cli.outcome import Outcome
from fullshard.errors import ConfigError, FullshardError
from fullshard.launch.machine import describe_versions

NAME = "benchmarks.xla"
MEASURE = "benchmarks.xla_rank:measure"
NUM_RANKS = 2
OURS, OURS_ONCE = "fullshard", "fullshard, gathered once"
AUTO, AUTO_ONCE = "auto", "auto, gathered once"
ONE = "one process"
ENGINES = {
    OURS: "full_shard",
    OURS_ONCE: "shard_grad_op",
    AUTO: "full_shard",
    AUTO_ONCE: "shard_grad_op",
    ONE: "none",
}
PEERS = {OURS: AUTO, OURS_ONCE: AUTO_ONCE}
ONE_GOAL, AUTO_GOAL = 1.2, 1.0
LOSS_TOLERANCE = 2e-5
HANGS = (
    "Its reductions are several all-reduces a step, which can wait for each other on XLA's gloo "
    "(docs/log.md, XLA: collectives and steps); the ranks did not end in time."
)
COLUMNS = (
    "engine",
    "strategy",
    "step, ms",
    "CPU, ms",
    "tokens/s",
    "to one process [95 %]",
    "to auto [95 %]",
)
METHOD = (
    "Two gloo processes on a core each, in which all three live and take one step each per round, "
    "in an order that turns with every round; a step is timed from when both ranks are ready until "
    "both have finished. Ratios are medians over the rounds of paired step times, with a 95 % "
    "bootstrap interval.",
    "The same decoder (Llama), float32, AdamW, first weights; a rank's batch is the same in all "
    "three, and one process has that of the first rank alone: it computes what each of two does.",
    "auto cuts the same dimensions of the same arrays; activations are pinned to the axis of "
    "samples and each block's arrays gathered in the loop, without which the partitioner moves "
    "more. What jax keeps for backward by itself are gathered arrays (gathered once); a policy of "
    "jax.checkpoint that keeps all else makes full_shard of it. A ratio to auto is one to auto "
    "with the same strategy. Losses of the first steps must agree with fullshard's within "
    f"{LOSS_TOLERANCE:g}.",
    "CPU is the processor time of one rank, all its threads; of one process that of the first.",
)


@dataclass(frozen=True)
class Shape:
    """A decoder and a rank's batch."""

    name: str
    width: int
    mlp_width: int
    layers: int
    heads: int
    vocab: int
    batch: int
    seq: int

    def config(self) -> dict[str, Any]:
        """Hugging Face configuration of the decoder."""
        return {
            "model_type": "llama",
            "hidden_size": self.width,
            "intermediate_size": self.mlp_width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "vocab_size": self.vocab,
            "tie_word_embeddings": False,
        }

    def describe(self) -> str:
        """Describes the shape in one line."""
        return (
            f"{self.name}: Llama of width {self.width} and {self.layers} blocks, {NUM_RANKS} "
            f"ranks, {self.batch} x {self.seq} tokens a rank, float32"
        )


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("29M", 512, 1376, 8, 8, 4096, 2, 256),
        Shape("tiny", 64, 128, 2, 4, 128, 2, 16),
    )
}


@dataclass(frozen=True)
class Job:
    """The job of the ranks."""

    shape: Shape
    num_rounds: int = 11
    engines: tuple[str, ...] = tuple(ENGINES)
    num_checked: int = 3


def find_shape(name: str) -> Shape:
    """Returns the case of that name.

    Raises:
        ConfigError: The name is unknown.
    """
    if name not in SHAPES:
        raise ConfigError(f"--case: expected one of {', '.join(SHAPES)}; got {name!r}.")
    return SHAPES[name]


def run(job: Job, *, command: str, timeout_s: float, wait: bool, say: Say) -> Page:
    """Measures all three; omits auto if its ranks hang.

    Raises:
        ConfigError: jax is not installed.
        FullshardError: The ranks failed.
    """
    if find_spec("jax") is None:
        raise ConfigError(
            "bench jax: expected jax, which is not installed. Run pip install 'fullshard[jax]'."
        )
    absent: dict[str, str] = {}
    say(f"{job.shape.describe()}: {job.num_rounds} rounds of {', '.join(job.engines)}")
    with Neighbours(wait=wait, say=say) as neighbours:
        try:
            results = _run_ranks(job, timeout_s)
        except FullshardError:
            absent |= {AUTO: HANGS, AUTO_ONCE: HANGS}
            job = replace(job, engines=(OURS, OURS_ONCE, ONE))
            say(f"once more without {AUTO}: its ranks did not end well")
            results = _run_ranks(job, timeout_s)
    return page_of(job, results, absent, neighbours, command)


def _run_ranks(job: Job, timeout_s: float) -> list[dict[str, Any]]:
    what = f"bench jax: the ranks of {job.shape.name}"
    return run_ranks(MEASURE, job, NUM_RANKS, what=what, timeout_s=timeout_s)


def page_of(
    job: Job,
    results: Sequence[Mapping[str, Any]],
    absent: Mapping[str, str],
    neighbours: Neighbours,
    command: str,
) -> Page:
    """Returns the rows and the page of the ranks' results.

    Args:
        job: Job of the ranks.
        results: Results of every rank.
        absent: Engines that could not run, and why.
        neighbours: Load by other processes.
        command: Command line of the benchmark.
    """
    rows = rows_of(job, results)
    notes = [job.shape.describe() + ".", *_goals(rows), *_loss_errors(results)]
    return Page(
        name="jax",
        title="JAX engine on two processes",
        command=command,
        rows=rows,
        columns=COLUMNS,
        cells=[_cells(row) for row in rows],
        method=METHOD,
        neighbours=neighbours,
        absent=absent,
        notes=notes,
        versions=describe_versions(("fullshard", "jax", "jaxlib", "optax")),
    )


def rows_of(job: Job, results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns one row per engine."""
    times_s = results[0]["times_s"]
    rows: list[dict[str, Any]] = []
    for name in job.engines:
        here = results[:1] if name == ONE else results
        step_time_s = median(times_s[name])
        tokens = len(here) * job.shape.batch * job.shape.seq
        others = {"ratio_to_one_process": ONE, "ratio_to_auto": PEERS.get(name)}
        ratios = {
            key: paired_ratio(times_s[name], times_s[other]).to_dict()
            for key, other in others.items()
            if other in times_s and other != name
        }
        rows.append(
            {
                "name": name,
                "strategy": ENGINES[name],
                "step_time_s": step_time_s,
                "tokens_per_s": tokens / step_time_s,
                "memory_peak_bytes": None,
                "cpu_step_s": fmean(median(rank["cpu_times_s"][name]) for rank in here),
                "num_rounds": job.num_rounds,
                **ratios,
            }
        )
    return rows


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    ratios = (row.get(key) for key in ("ratio_to_one_process", "ratio_to_auto"))
    return (
        row["name"],
        row["strategy"],
        f"{row['step_time_s'] * 1e3:.1f}",
        f"{row['cpu_step_s'] * 1e3:.1f}",
        f"{row['tokens_per_s']:.0f}",
        *("-" if ratio is None else str(Estimate(**ratio)) for ratio in ratios),
    )


def _goals(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    goals = [("ratio_to_one_process", {OURS: ONE}, ONE_GOAL), ("ratio_to_auto", PEERS, AUTO_GOAL)]
    found = []
    for row in rows:
        for key, peers, goal in goals:
            name, ratio = row["name"], row.get(key)
            if ratio is not None and name in peers:
                said = "met" if ratio["value"] <= goal else "not met"
                step = f"{ratio['value']:.3f} of the step of {peers[name]}"
                found.append(f"{name}: {step} (goal {goal}: {said}).")
    return found


def _loss_errors(results: Sequence[Mapping[str, Any]]) -> list[str]:
    losses = {name: found for name, found in results[0]["losses"].items() if name != ONE}
    differences = largest_difference(losses, OURS)
    return [
        f"Losses of {name} differ from {OURS}'s by {difference:.1e}. Do not compare its speed."
        for name, difference in differences.items()
        if not difference <= LOSS_TOLERANCE
    ]


def main(
    case: Annotated[str, typer.Option(help="Model: 29M or tiny.")] = "29M",
    rounds: Annotated[int, typer.Option(min=2, help="Timed steps per engine.")] = 11,
    timeout: Annotated[float, typer.Option(help="Time limit for all ranks, s.")] = 900.0,
    wait: WaitFlag = False,
    out: OutFlag = None,
    as_json: JsonFlag = False,  # noqa: ARG001  read by run_script
) -> Outcome:
    """Time the JAX engine on two gloo processes, one process, and XLA's partitioner."""
    job, command = Job(find_shape(case), rounds), command_line(NAME)
    return show(run(job, command=command, timeout_s=timeout, wait=wait, say=say), out)


if __name__ == "__main__":
    run_script(NAME)
