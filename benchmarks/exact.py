"""`python -m benchmarks.exact`: planned memory of the XLA engine, compared with XLA's figure.

Eight Llamas are planned and compiled, each by `fullshard plan --exact` in its own process, because
jax fixes its number of devices at the start. Nothing runs, so load on the machine has no effect.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.command import JsonFlag, command_line, run_script
from fullshard.bench.measurement import Neighbours, Page
from fullshard.cli.bench import OutFlag, say, show
from fullshard.cli.outcome import Outcome
from fullshard.errors import ConfigError, FullshardError
from fullshard.launch.machine import describe_versions
from fullshard.planner.text import human_bytes

NAME = "benchmarks.exact"
NUM_DEVICES = 4
GOAL = 0.05
COLUMNS = ("model", "strategy", "recompute", "tokens", "state", "plan", "XLA", "plan to XLA")
METHOD = (
    f"A step of one sample a device on {NUM_DEVICES} devices (or on the topology's), float32 on "
    "CPUs and bfloat16 elsewhere, AdamW, by `fullshard plan backend=jax --exact`. XLA's figure is "
    "the peak of its memory analysis: arguments, temporaries and outputs that are not in place.",
    "state is what XLA counts as arguments above the plan's parameters and optimizer state: the "
    "batch and the step's number.",
)


@dataclass(frozen=True)
class Case:
    """A Llama and its training settings."""

    name: str
    width: int
    layers: int
    vocab: int
    strategy: str
    recompute: str
    tokens: int

    def words(self) -> list[str]:
        """Returns the arguments of `fullshard plan`."""
        heads = self.width // 64
        mlp_width = 8 * self.width // 3 // 32 * 32
        sizes = {
            "hidden_size": self.width,
            "intermediate_size": mlp_width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "vocab_size": self.vocab,
            "tie_word_embeddings": "false",
        }
        inside = ", ".join(f"{key}: {value}" for key, value in sizes.items())
        return [
            "backend=jax",
            f"model.config={{model_type: llama, {inside}}}",
            f"sharding.strategy={self.strategy}",
            f"sharding.activation_checkpointing={self.recompute}",
            f"training.max_seq_length={self.tokens}",
            "training.per_device_train_batch_size=1",
        ]


CASES = (
    Case("8M", 256, 8, 2048, "full_shard", "none", 512),
    Case("8M", 256, 8, 2048, "shard_grad_op", "selective", 256),
    Case("30M", 512, 8, 4096, "full_shard", "block", 256),
    Case("30M", 512, 8, 4096, "full_shard", "selective", 1024),
    Case("110M", 768, 12, 16000, "full_shard", "block", 512),
    Case("110M", 768, 12, 16000, "full_shard", "every_2", 1024),
    Case("45M", 512, 4, 32000, "full_shard", "block", 1024),
    Case("45M", 512, 4, 32000, "shard_grad_op", "none", 1024),
)


def run(
    cases: Sequence[Case], topology: str | None, *, command: str, say: Callable[[str], None]
) -> Page:
    """Plan and compile all cases.

    Args:
        cases: Models and settings to compile.
        topology: TPUs or GPUs to compile for, which need not be installed; None: CPUs.
        command: Command line of the benchmark.
        say: Prints a progress line.

    Raises:
        ConfigError: jax is not installed.
        FullshardError: A case cannot be planned or compiled.
    """
    if find_spec("jax") is None:
        raise ConfigError(
            "bench exact: expected jax, which is not installed. Run pip install 'fullshard[jax]'."
        )
    rows: list[dict[str, Any]] = []
    with Neighbours() as neighbours:
        for case in cases:
            say(f"{case.name}, {case.strategy}, {case.recompute}, {case.tokens} tokens")
            rows.append(_row(case, topology))
    return page_of(rows, topology, neighbours, command)


def _row(case: Case, topology: str | None) -> dict[str, Any]:
    target = ["--topology", topology] if topology else ["--gpus", str(NUM_DEVICES)]
    words = [*case.words(), *([] if topology is None else ["sharding.param_dtype=bfloat16"])]
    command = [sys.executable, "-m", "fullshard", "plan", *words, *target, "--exact", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FullshardError(f"bench exact: {case.name} did not compile:\n{done.stderr[-2000:]}")
    return row_of(case, json.loads(done.stdout))


def row_of(case: Case, found: dict[str, Any]) -> dict[str, Any]:
    """Returns one row from the output of `fullshard plan --exact --json`."""
    exact = found["exact"]
    return {
        "name": f"{case.name} {case.strategy} {case.recompute} {case.tokens}",
        "model": case.name,
        "num_parameters": found["plan"]["num_parameters"],
        "strategy": case.strategy,
        "recompute": case.recompute,
        "tokens": case.tokens,
        "state_error_bytes": exact["error"]["state_bytes"],
        "plan_bytes": found["peak_bytes"]["device"],
        "xla_bytes": exact["peak_bytes"],
        "error": exact["error"]["peak"],
        "same_collectives": exact["error"]["collectives"],
    }


def page_of(
    rows: Sequence[dict[str, Any]], topology: str | None, neighbours: Neighbours, command: str
) -> Page:
    """Returns the page of all rows."""
    errors = sorted(abs(row["error"]) for row in rows)
    middle = median(errors)
    said = "met" if middle <= GOAL else "not met"
    differ = [row["name"] for row in rows if row["same_collectives"] is False]
    notes = [
        f"Median error {middle:.1%}, largest {errors[-1]:.1%} (goal {GOAL:.0%} in the median: "
        f"{said}).",
        *(f"{name}: XLA's collectives are not the plan's." for name in differ),
    ]
    kind = "" if topology is None else "_tpu" if ":" in topology else "_gpu"
    return Page(
        name=f"exact{kind}",
        title=f"The plan's memory beside XLA's, for {topology or f'{NUM_DEVICES} CPU devices'}",
        command=command,
        rows=rows,
        columns=COLUMNS,
        cells=[_cells(row) for row in rows],
        method=METHOD,
        neighbours=neighbours,
        notes=notes,
        versions=describe_versions(("fullshard", "jax", "jaxlib", "optax")),
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['model']} ({row['num_parameters']:,})",
        row["strategy"],
        row["recompute"],
        str(row["tokens"]),
        f"{row['state_error_bytes']:+,} B",
        human_bytes(row["plan_bytes"]),
        human_bytes(row["xla_bytes"]),
        f"{row['error']:+.1%}",
    )


def main(
    topology: Annotated[
        str | None, typer.Option(help="TPUs (v5p:2x2x2) or GPUs (8xH100-80GB). Default: CPUs.")
    ] = None,
    out: OutFlag = None,
    as_json: JsonFlag = False,  # noqa: ARG001  read by run_script
) -> Outcome:
    """Compare the planned memory of the XLA engine with XLA's figure."""
    command = command_line(NAME)
    return show(run(CASES, topology, command=command, say=say), out)


if __name__ == "__main__":
    run_script(NAME)
