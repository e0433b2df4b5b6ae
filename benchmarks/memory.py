"""`python -m benchmarks.memory`: planned memory, compared with the memory of a run.

A case is a Hugging Face architecture, a strategy, an activation checkpointing mode and a compute
dtype. `fullshard plan` makes the plan, and `fullshard train` the run. The measured figure is the
peak of the allocator's live bytes, from the profiler's memory events. The figures do not depend on
the load of the machine.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from benchmarks.command import JsonFlag, command_line, run_script
from fullshard.bench.measurement import Neighbours, Page, run_ranks
from fullshard.cli.bench import OutFlag, say, show
from fullshard.cli.outcome import Outcome
from fullshard.config.load import load_config
from fullshard.config.schema import RunConfig
from fullshard.errors import ConfigError

NAME = "benchmarks.memory"
MEASURE = "benchmarks.memory_rank:measure_all"
MIB = 1 << 20
SIZES: dict[str, Any] = {
    "vocab_size": 2000,
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": NO_DROPOUT,
    "qwen2": {},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "head_dim": 32,
    },
    "mistral": {"sliding_window": 64},
    "phi": {},
    "gemma": {"head_dim": 32},
    "opt": {"ffn_dim": 512, "word_embed_proj_dim": 128, "dropout": 0.0},
    "gpt_neox": {},
    "bloom": {},
}
FLAT = ("full_shard", "shard_grad_op", "no_shard")
HYBRID = "hybrid_shard"
RECOMPUTES = ("none", "block", "selective", "every_2")
COLUMNS = (
    *("model", "strategy", "recompute", "compute", "transport"),
    *("planned, MiB", "measured, MiB", "error"),
)
METHOD = (
    "Two ranks over gloo (hybrid: four, two replicas), AdamW, four samples of "
    "256 tokens a rank, three steps; the largest rank's peak. Measured is the highest sum of live "
    "bytes of torch's CPU allocator, from the memory events of torch.profiler, of everything from "
    "building the model on: weights, slots, gradients, optimizer, activations. It is no resident "
    "set, and is the same on a busy machine.",
    "Planned is the device's peak that `fullshard plan` says of the same configuration: state of "
    "the plan, and the activations of a trace of the model under fake tensors. What a shared home "
    "maps (weights, gradient slots) is no allocator's, and is left out of both.",
)


@dataclass(frozen=True)
class MemoryCase:
    """A run with planned and measured memory."""

    kind: str
    strategy: str
    recompute: str
    compute: str = "float32"
    accumulation: int = 1
    transport: str = "direct"

    @property
    def num_ranks(self) -> int:
        """Returns the number of ranks of the run."""
        return 4 if self.strategy == HYBRID else 2

    def config(self) -> RunConfig:
        """Returns the configuration of the run."""
        return load_config(None, self.words()).config

    def words(self) -> list[str]:
        """Returns the arguments of `fullshard train`."""
        model = {"model_type": self.kind, **SIZES, **ARCHITECTURES[self.kind]}
        words = {
            "model.config": json.dumps(_accepted(model)),
            "sharding.strategy": self.strategy,
            "sharding.activation_checkpointing": self.recompute,
            "sharding.transport": self.transport,
            "training.per_device_train_batch_size": 4,
            "training.gradient_accumulation_steps": self.accumulation,
            "training.max_seq_length": 256,
            "training.learning_rate": 1e-3,
        }
        if self.strategy == HYBRID:
            words["sharding.replicate"] = 2
        if self.compute != "float32":
            words["sharding.param_dtype"] = self.compute
        return [f"{key}={value}" for key, value in words.items()]


def _accepted(model: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys that the architecture's configuration accepts; names differ."""
    from transformers import CONFIG_MAPPING

    from fullshard.models.config import accepted_keys

    known = accepted_keys(CONFIG_MAPPING[model["model_type"]])
    return {key: value for key, value in model.items() if key in known or key == "model_type"}


def all_cases() -> list[MemoryCase]:
    """Returns every architecture and checkpointing mode, strategies in turn; llama has all."""
    found = [
        MemoryCase(kind, FLAT[(at + turn) % len(FLAT)], recompute)
        for at, kind in enumerate(ARCHITECTURES)
        for turn, recompute in enumerate(RECOMPUTES)
    ]
    found += [MemoryCase("llama", s, r) for s in (*FLAT, HYBRID) for r in RECOMPUTES]
    found += [MemoryCase(kind, "full_shard", "none", "bfloat16") for kind in ARCHITECTURES]
    found += [
        MemoryCase("llama", strategy, "block", compute, transport=transport)
        for strategy, compute in (("full_shard", "float32"), ("shard_grad_op", "bfloat16"))
        for transport in ("c10d", "shared")
    ]
    return list(dict.fromkeys(found))


def find_cases(kinds: Sequence[str]) -> list[MemoryCase]:
    """Returns the cases of these architectures; all if none is given.

    Raises:
        ConfigError: One is unknown.
    """
    for kind in kinds:
        if kind not in ARCHITECTURES:
            raise ConfigError(f"--model: expected one of {', '.join(ARCHITECTURES)}; got {kind!r}.")
    return [case for case in all_cases() if not kinds or case.kind in kinds]


@dataclass(frozen=True)
class Job:
    """Cases that the ranks measure one after another."""

    cases: tuple[MemoryCase, ...]


def run(
    cases: Sequence[MemoryCase], *, command: str, timeout_s: float, say: Callable[[str], None]
) -> Page:
    """Plans and measures every case."""
    rows: list[dict[str, Any]] = []
    with Neighbours() as neighbours:
        for num_ranks in (2, 4):
            chosen = tuple(case for case in cases if case.num_ranks == num_ranks)
            if chosen:
                say(f"{len(chosen)} runs on {num_ranks} ranks, one after the other")
                what = f"bench memory: its {num_ranks} ranks"
                found = run_ranks(MEASURE, Job(chosen), num_ranks, what=what, timeout_s=timeout_s)
                rows += [_row(case, [r[at] for r in found]) for at, case in enumerate(chosen)]
    return Page(
        "memory",
        "Planned and measured memory",
        command,
        rows,
        COLUMNS,
        [_cells(row) for row in rows],
        METHOD,
        neighbours,
        notes=(summary([row["error"] for row in rows]),),
    )


def _row(case: MemoryCase, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    measured = max(rank["measured_bytes"] for rank in ranks)
    planned = max(rank["planned_bytes"] for rank in ranks)
    return {
        **asdict(case),
        "planned_bytes": planned,
        "measured_bytes": measured,
        "is_traced": all(rank["is_traced"] for rank in ranks),
        "error": planned / measured - 1,
    }


def summary(errors: Sequence[float]) -> str:
    """Returns the errors in one line."""
    sizes = sorted(abs(error) for error in errors)
    within = sum(size <= 0.03 for size in sizes)
    return (
        f"{len(sizes)} runs: median error {statistics.median(sizes):.2%}, largest {sizes[-1]:.2%}; "
        f"{within} of them within 3 %."
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["kind"],
        row["strategy"],
        row["recompute"],
        row["compute"],
        row["transport"],
        f"{row['planned_bytes'] / MIB:.2f}",
        f"{row['measured_bytes'] / MIB:.2f}",
        f"{row['error']:+.2%}" + ("" if row["is_traced"] else " (not traced)"),
    )


def main(
    model: Annotated[
        list[str] | None,
        typer.Option(help="llama, gpt2, qwen3_moe ...; repeatable. Default: all ten."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Time limit per group of ranks, s.")] = 3600.0,
    out: OutFlag = None,
    as_json: JsonFlag = False,  # noqa: ARG001  read by run_script
) -> Outcome:
    """Compare the planned memory with the peak of the allocator's live bytes."""
    cases = find_cases(model or ())
    return show(run(cases, command=command_line(NAME), timeout_s=timeout, say=say), out)


if __name__ == "__main__":
    run_script(NAME)
