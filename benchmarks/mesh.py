"""`python -m benchmarks.mesh`: steps with a tensor or expert axis, ours and transformers'.

Both sides load the same folder. transformers applies its tensor or expert plan and FSDP2
(`DistributedConfig`); fullshard applies the same plan and shards (`fs.shard(tensor=2)`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import JsonFlag, command_line, run_script
from fullshard.bench.measurement import (
    Neighbours,
    Page,
    describe_versions,
    largest_difference,
    median_of,
    paired_ratio,
    run_ranks,
    slowest,
)
from fullshard.cli.bench import OutFlag, WaitFlag, say, show
from fullshard.cli.outcome import Outcome

NAME = "benchmarks.mesh"
MEASURE = "benchmarks.mesh_rank:measure"
OURS, DIRECT, THEIRS = "fullshard", "fullshard, direct", "transformers + FSDP2"
TRANSPORTS = {OURS: "auto", DIRECT: "direct"}
NUM_RANKS, WARM_UP = 4, 3
GOAL = 0.75
SIZES: Mapping[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
    "max_position_embeddings": 256,
}
COLUMNS = (
    "case",
    "engine",
    "step, ms [95 %]",
    "ratio [95 %]",
    "collectives, sends a step",
    "loss differs by",
)


@dataclass(frozen=True)
class MeshCase:
    """A model and its mesh on four ranks.

    Attributes:
        axes: Sizes for `fs.shard`.
        theirs: Sizes for transformers' `DistributedConfig`.
    """

    name: str
    config: Mapping[str, Any]
    axes: Mapping[str, Any]
    theirs: Mapping[str, Any]
    batch: int = 4
    length: int = 128


_MIXTURE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
}
CASES = (
    MeshCase(
        "tp",
        {"model_type": "llama", "num_hidden_layers": 6},
        {"tensor": 2},
        {"tp_size": 2, "fsdp_size": 2},
    ),
    MeshCase("ep", _MIXTURE, {"expert": 2}, {"ep_size": 2, "tp_size": 1, "fsdp_size": 4}),
)
METHOD = (
    "Four gloo ranks train in float32 with AdamW, without clipping (torch's clipping raises an "
    "error on transformers' two meshes). The engines take a step each in every round, in turn.",
    "A step is as slow as its slowest rank. Ratios are fullshard's time over transformers' in the "
    "same round: the median with a 95 % bootstrap interval.",
    "`transport: auto` shares memory between these ranks; `direct` sends messages, as transformers "
    "and FSDP2 do.",
    "Collectives and sends are those of process groups in one step of rank 0, seen by torch's "
    "profiler. gloo carries out a collective as several messages.",
    "The difference of losses is the largest over all measured steps, relative.",
)


@dataclass(frozen=True)
class Job:
    """Settings of the ranks' measurement."""

    case: MeshCase
    folder: Path
    num_rounds: int


def run(
    cases: Sequence[MeshCase],
    num_rounds: int,
    *,
    command: str,
    wait: bool,
    say: Callable[[str], None],
) -> Page:
    """Measures every case."""
    rows: list[dict[str, Any]] = []
    with Neighbours(wait=wait, say=say) as neighbours, tempfile.TemporaryDirectory() as place:
        for case in cases:
            say(f"{case.name}: {case.config['model_type']}, {num_rounds} rounds")
            job = Job(case, _write_model(case, Path(place) / case.name), num_rounds)
            what = f"benchmarks.mesh: the ranks of {case.name}"
            ranks = run_ranks(MEASURE, job, NUM_RANKS, what=what, timeout_s=1200.0)
            rows += rows_of(case, ranks)
    return Page(
        "mesh",
        "Steps with a tensor or expert axis",
        command,
        rows,
        COLUMNS,
        [_cells(row) for row in rows],
        METHOD,
        neighbours,
        versions=describe_versions(("fullshard", "torch", "transformers")),
    )


def _write_model(case: MeshCase, folder: Path) -> Path:
    """Writes random weights that both sides load."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**SIZES, **case.config})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def rows_of(case: MeshCase, ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each engine."""
    times = slowest([rank["times"] for rank in ranks])
    losses = largest_difference(ranks[0]["losses"], THEIRS)
    return [
        {
            "name": name,
            "case": case.name,
            "num_ranks": NUM_RANKS,
            "step_s": median_of(times[name]).to_dict(),
            "ratio": None if name == THEIRS else paired_ratio(times[name], times[THEIRS]).to_dict(),
            "goal": GOAL,
            "collectives": ranks[0]["collectives"][name],
            "loss_difference": losses[name],
            "num_rounds": len(times[name]),
        }
        for name in (*TRANSPORTS, THEIRS)
    ]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    step, ratio = row["step_s"], row["ratio"]
    return (
        row["case"],
        row["name"],
        f"{1e3 * step['value']:.0f} [{1e3 * step['low']:.0f}, {1e3 * step['high']:.0f}]",
        f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]" if ratio else "1",
        _counts(row["collectives"]),
        f"{row['loss_difference']:.1e}",
    )


def _counts(found: Mapping[str, int]) -> str:
    """Returns the numbers of collectives and sends; receives and barriers are not counted."""
    others = sum(count for name, count in found.items() if name not in ("send", "recv_", "barrier"))
    return f"{others}, {found.get('send', 0)}"


def main(
    case: Annotated[list[str] | None, typer.Option(help="tp or ep. Default: both.")] = None,
    rounds: Annotated[int, typer.Option(help="Measured rounds.", min=3)] = 21,
    wait: WaitFlag = False,
    out: OutFlag = None,
    as_json: JsonFlag = False,  # noqa: ARG001  read by run_script
) -> Outcome:
    """Measure steps with a tensor or expert axis, ours and transformers'."""
    chosen = [one for one in CASES if case is None or one.name in case]
    page = run(chosen, rounds, command=command_line(NAME), wait=wait, say=say)
    return show(page, out)


if __name__ == "__main__":
    run_script(NAME)
