"""`fullshard bench step`: times a training step of several engines side by side.

This module has the cases and engines as data, starts the ranks (`bench/engines.py`) and makes the
page of their results. It imports no torch.

Method:

All engines run in the same processes, as many as fit into memory and FSDP2 always among them. They
run one step each per round, in an order that rotates with every round. A step is timed from when
every rank is ready until every rank has finished. Ratios are medians over the rounds of paired step
times, with a 95 % bootstrap interval. One thread per rank, fused AdamW over the trained parameters,
the same seeds; every rank has its own batches. FSDP2's prefetch distance is the fastest of 0, 1 and
2 in a pilot.

Parameters, reduction and optimizer are float32. In bfloat16 cases, forward and backward
compute in it: ours by param_dtype, FSDP2 and FSDP1 by their mixed precision; the floor's model is
bfloat16 and its updated part is cast once per step. Losses are float32; those of the first steps
must agree with FSDP2's within {float32:g}, in bfloat16 within {bfloat16:g}.

CPU is the processor time of one rank, all its threads. Other processes lengthen it far less than
the step.

The floor runs the same processes without any message and updates 1/W of the parameters; removed = 1
- (ours - floor) / (FSDP2 - floor).

Memory is measured with each engine alone in fresh processes: the sampled peak of the proportional
set size during three steps, minus the size before the model was built, of the rank with the largest
figure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from math import isfinite
from statistics import fmean, median
from typing import Any, Literal

from fullshard.bench.measurement import (
    Estimate,
    Neighbours,
    Page,
    Say,
    largest_difference,
    method_of,
    paired_ratio,
    removed_share,
    run_ranks,
)
from fullshard.config.host_memory import available_bytes
from fullshard.errors import ConfigError
from fullshard.launch.machine import describe_versions

Kind = Literal["gpt", "moe", "lora"]
Compute = Literal["float32", "bfloat16"]

NUM_EXPERTS, NUM_CHOSEN = 8, 2  # "moe": experts per block, and experts per token
ADAPTER_RANK = 8  # "lora": rank of the adapters on qkv and out of every block


@dataclass(frozen=True)
class Case:
    """One model on one number of ranks.

    Attributes:
        batch: Sequences per rank and step.
        seq: Tokens per sequence.
        kind: "gpt"; "moe", whose feed-forwards are experts; "lora", a frozen GPT with adapters.
        compute: Dtype of forward and backward; parameters and optimizer are float32.
    """

    name: str
    width: int
    layers: int
    vocab: int
    batch: int
    seq: int
    num_ranks: int
    kind: Kind = "gpt"
    compute: Compute = "float32"

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all ranks in one step."""
        return self.num_ranks * self.batch * self.seq

    @property
    def numel(self) -> int:
        """Parameters of the model."""
        width = self.width
        feed_forward = 8 * width**2 + 5 * width
        block = 4 * width**2 + 8 * width + feed_forward
        if self.kind == "moe":
            block += (NUM_EXPERTS - 1) * feed_forward + NUM_EXPERTS * width
        elif self.kind == "lora":
            block += 6 * ADAPTER_RANK * width
        return self.layers * block + 2 * self.vocab * width + 2 * width

    def describe(self) -> str:
        """Returns the shape in one line."""
        return (
            f"{self.name}: {MODELS[self.kind]} of width {self.width} and {self.layers} blocks, "
            f"{self.num_ranks} ranks, {self.batch} x {self.seq} tokens per rank, {self.compute}"
        )


MODELS: dict[Kind, str] = {
    "gpt": "GPT",
    "moe": f"GPT with {NUM_CHOSEN} of {NUM_EXPERTS} experts per token",
    "lora": f"frozen GPT with adapters of rank {ADAPTER_RANK}",
}
_109M = Case("109M", width=1024, layers=8, vocab=4096, batch=1, seq=128, num_ranks=2)

CASES = {
    case.name: case
    for case in (
        Case("tiny", width=64, layers=2, vocab=128, batch=2, seq=16, num_ranks=2),
        Case("29M", width=512, layers=8, vocab=4096, batch=2, seq=256, num_ranks=2),
        _109M,
        Case("29M-4", width=512, layers=8, vocab=4096, batch=1, seq=128, num_ranks=4),
        replace(_109M, name="109M-bf16", compute="bfloat16"),
        Case("moe", width=256, layers=6, vocab=4096, batch=2, seq=256, num_ranks=2, kind="moe"),
        replace(_109M, name="lora", kind="lora"),
    )
}
DEFAULT_CASES = ("29M", "109M", "29M-4", "109M-bf16", "moe", "lora")

OURS, REFERENCE, FLOOR = "fullshard", "fsdp2", "floor"
CORE = (OURS, REFERENCE, FLOOR)
# Bytes per parameter of an unsharded rank: AdamW's 16, or the weight of a frozen base; plus
# activations.
TRAINED_BYTES, FROZEN_BYTES = 20, 8


@dataclass(frozen=True)
class Peer:
    """One engine of the comparison.

    Attributes:
        package: Import name of the package that it needs.
        trains: False for the floor, whose losses mean nothing.
    """

    name: str
    strategy: str
    package: str
    about: str
    trains: bool = True


PEERS = {
    peer.name: peer
    for peer in (
        Peer("fullshard", "full_shard", "fullshard", "ours, (C) shared home"),
        Peer("fullshard-direct", "full_shard", "fullshard", "ours, (B) parts sent directly"),
        Peer("fullshard-c10d", "full_shard", "fullshard", "ours, (A) gloo's own collectives"),
        Peer("fsdp2", "full_shard", "torch", "fully_shard per block, reshard_after_forward=True"),
        Peer("fsdp2-zero2", "shard_grad_op", "torch", "the same, reshard_after_forward=False"),
        Peer("fsdp1", "full_shard", "torch", "FullyShardedDataParallel, use_orig_params=True"),
        Peer("ddp", "no_shard", "torch", "DistributedDataParallel, gradient_as_bucket_view=True"),
        Peer("deepspeed", "full_shard", "deepspeed", "DeepSpeed ZeRO stage 3"),
        Peer("deepspeed-zero2", "shard_grad_op", "deepspeed", "DeepSpeed ZeRO stage 2"),
        Peer("floor", "none", "torch", "no communication, 1/W of the optimizer", trains=False),
    )
}


# Engines that cannot run a case of this dtype together with the others, and why.
UNFIT: dict[tuple[str, Compute], str] = {
    ("ddp", "bfloat16"): "it has no bfloat16 compute; autocast keeps norms and sums in float32, "
    "which is another arithmetic",
    ("deepspeed", "bfloat16"): "its bfloat16 mode has an optimizer of its own",
    ("deepspeed-zero2", "bfloat16"): "its bfloat16 mode has an optimizer of its own",
}


def unfit_of(case: Case, peers: Sequence[Peer]) -> dict[str, str]:
    """Returns the names of the engines that cannot run the case, each with the reason."""
    reasons = {peer.name: UNFIT.get((peer.name, case.compute)) for peer in peers}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def installed_peers(names: tuple[str, ...]) -> tuple[list[Peer], list[str]]:
    """Splits engine names into the peers that can run here and the names that are absent."""
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise ConfigError(f"engine: expected one of {', '.join(PEERS)}, got {unknown[0]!r}.")
    wanted = [PEERS[name] for name in dict.fromkeys(names)]
    present = [peer for peer in wanted if find_spec(peer.package) is not None]
    return present, [peer.name for peer in wanted if peer not in present]


def groups_of(peers: Sequence[Peer], case: Case, budget_bytes: int) -> list[tuple[Peer, ...]]:
    """Divides engines into groups that fit into memory at the same time.

        all fit    [fullshard, fsdp2, floor, ddp, fsdp1]
        three fit  [fullshard, fsdp2, floor]  [fsdp2, ddp, fsdp1]
        no engine  none

    Ours, FSDP2 and the floor are in the first group. FSDP2 is in every group, since all ratios are
    relative to it.
    """
    a_parameter = FROZEN_BYTES if case.kind == "lora" else TRAINED_BYTES
    engine_bytes = a_parameter * case.numel * case.num_ranks
    size = max(len(CORE), budget_bytes // engine_bytes)
    if len(peers) <= size:
        return [tuple(peers)] if peers else []
    core = [peer for peer in peers if peer.name in CORE]
    rest = [peer for peer in peers if peer.name not in CORE]
    pair = [peer for peer in core if peer.name == REFERENCE]
    num_first, num_later = size - len(core), size - len(pair)
    later = rest[num_first:]
    return [
        (*core, *rest[:num_first]),
        *((*pair, *later[i : i + num_later]) for i in range(0, len(later), num_later)),
    ]


def find_case(name: str) -> Case:
    """Looks up a case by name.

    Raises:
        ConfigError: There is no such case.
    """
    if name not in CASES:
        found = f"case: expected one of {', '.join(CASES)}, got {name!r}."
        others = " `python -m benchmarks.mesh`, in a clone, measures other axes (tp, ep)."
        raise ConfigError(found + others * (name in ("tp", "ep")))
    return CASES[name]


MEASURE = "fullshard.bench.engines:measure"
MIB = 2**20
# Losses of float32 runs differ by the order of sums; a wrong gradient shows at the third digit.
# In bfloat16 another order of sums rounds a weight to its neighbour, 0.4 % away.
LOSS_TOLERANCE: dict[Compute, float] = {"float32": 2e-5, "bfloat16": 5e-4}

# For the estimate of the duration: start of a group, untimed steps, a step relative to its matmuls.
START_S, FIRST_STEPS, OVERHEAD = 15.0, 5, 1.2
FLOPS_PER_S = 1e11  # of matmuls, all ranks together

RAW = ("losses", "times_s")  # fields of a row that are stored with its case in the JSON
COLUMNS = (
    "case",
    "engine",
    "strategy",
    "step, ms",
    "CPU, ms",
    "tokens/s",
    "to FSDP2 [95 %]",
    "peak, MiB",
    "loss difference",
)
METHOD = method_of(__doc__, **LOSS_TOLERANCE)


@dataclass(frozen=True)
class StepJob:
    """The job of one group of ranks.

    Attributes:
        engines: Names of the engines.
        mode: "time" (all engines in turn) or "memory" (one engine alone).
        num_rounds: Timed steps per engine.
        num_checked: First steps, whose losses are compared; they also warm up.
        prefetch: FSDP2's prefetch distance by engine name; None: a pilot chooses it.
    """

    case: Case
    engines: tuple[str, ...]
    mode: str
    num_rounds: int
    num_checked: int = 3
    prefetch: dict[str, int] | None = None


@dataclass(frozen=True)
class CaseResult:
    """The results of one case.

    Attributes:
        rows: The row of each engine by name, in the order of the table.
        neighbours: How much other processes used the machine while engines were timed.
        pilot_s: FSDP2's best step by prefetch distance.
        unfit: Engines that cannot run this case, with the reason.
    """

    case: Case
    rows: Mapping[str, dict[str, Any]]
    neighbours: Neighbours
    pilot_s: dict[str, float]
    unfit: dict[str, str]

    @property
    def removed(self) -> Estimate | None:
        """Share of FSDP2's overhead above the floor that ours removes; None if one is missing."""
        if not {OURS, REFERENCE, FLOOR} <= self.rows.keys():
            return None
        return removed_share(*(self.rows[name]["times_s"] for name in (OURS, REFERENCE, FLOOR)))


@dataclass(frozen=True)
class StepOptions:
    """Settings of the measurement.

    Attributes:
        timeout_s: Limit for one group of ranks.
    """

    num_rounds: int = 11
    measure_memory: bool = True
    wait: bool = False
    timeout_s: float = 1800.0


# ---- measure -------------------------------------------------------------------------------------


def expected_s(cases: Sequence[Case], peers: Sequence[Peer], options: StepOptions) -> float:
    """Estimates the duration: 6 FLOPs per parameter and token at the usual speed of a few cores."""
    total = 0.0
    for case in cases:
        num_engines = len(peers) - len(unfit_of(case, peers))
        num_groups = len(_groups(case, peers))
        step_s = OVERHEAD * 6 * case.numel * case.tokens_per_step / FLOPS_PER_S
        total += num_groups * START_S + num_engines * (options.num_rounds + FIRST_STEPS) * step_s
        total += options.measure_memory * num_engines * (START_S + FIRST_STEPS * step_s)
    return total


def _groups(case: Case, peers: Sequence[Peer]) -> list[tuple[Peer, ...]]:
    return groups_of(peers, case, available_bytes() * 6 // 10)


def run_case(case: Case, peers: Sequence[Peer], options: StepOptions, say: Say) -> CaseResult:
    """Measure one case: engines in turn, group by group, then each alone for its memory.

    Raises:
        FullshardError: A rank failed; its own error has been shown.
    """

    def on_ranks(job: StepJob) -> list[dict]:
        what = f"bench step: the ranks of {case.name} ({job.mode}: {', '.join(job.engines)})"
        return run_ranks(MEASURE, job, case.num_ranks, what=what, timeout_s=options.timeout_s)

    unfit = unfit_of(case, peers)
    peers = [peer for peer in peers if peer.name not in unfit]
    memory = dict[str, int]()
    measured: list[tuple[tuple[Peer, ...], list[dict]]] = []
    prefetch = None
    with Neighbours(wait=options.wait, say=say) as neighbours:
        for group in _groups(case, peers):
            names = tuple(peer.name for peer in group)
            say(f"{case.describe()}: {options.num_rounds} rounds of {', '.join(names)}")
            job = StepJob(case, names, "time", options.num_rounds, prefetch=prefetch)
            measured.append((group, on_ranks(job)))
            prefetch = measured[-1][1][0]["prefetch"]
    for peer in peers if options.measure_memory else ():
        say(f"{case.name}: memory of {peer.name}, alone")
        ranks = on_ranks(StepJob(case, (peer.name,), "memory", 0, prefetch=prefetch))
        memory[peer.name] = max(rank["memory_peak_bytes"] for rank in ranks)
    rows: dict[str, dict[str, Any]] = {}
    for group, ranks in measured:
        rows = _rows(case, group, ranks, memory) | rows  # keeps FSDP2's first row
    return CaseResult(
        case,
        {peer.name: rows[peer.name] for peer in peers},
        neighbours,
        next((ranks[0]["pilot_s"] for _, ranks in measured if ranks[0]["pilot_s"]), {}),
        unfit,
    )


def _rows(
    case: Case, group: Sequence[Peer], ranks: list[dict], memory: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    """The JSON rows of a group's engines, and the parts stored separately in the JSON (RAW)."""
    first = ranks[0]
    differences = loss_differences({p.name: first["losses"][p.name] for p in group if p.trains})
    paired = first["times_s"].get(REFERENCE)
    found: dict[str, dict[str, Any]] = {}
    for peer in group:
        times, difference = first["times_s"][peer.name], differences.get(peer.name)
        found[peer.name] = {
            "name": peer.name,
            "strategy": peer.strategy,
            "step_time_s": median(times),
            "tokens_per_s": case.tokens_per_step / median(times),
            "memory_peak_bytes": memory.get(peer.name),
            "case": case.name,
            "num_ranks": case.num_ranks,
            "cpu_step_s": fmean(median(rank["cpu_times_s"][peer.name]) for rank in ranks),
            "num_rounds": len(times),
            "ratio_to_fsdp2": paired_ratio(times, paired).to_dict() if paired else None,
            "loss_difference": _finite(difference),
            "prefetch": first["prefetch"].get(peer.name),
            "equal_losses": difference is None or difference <= LOSS_TOLERANCE[case.compute],
            "times_s": times,
            "losses": [*map(_finite, first["losses"][peer.name])],
        }
    return found


def _finite(value: float | None) -> float | None:
    """The value for JSON, which has no NaN and no infinity."""
    return value if value is not None and isfinite(value) else None


def loss_differences(losses: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Returns every engine's largest relative difference to FSDP2's losses, or to the first's."""
    if not losses:
        return {}
    return largest_difference(losses, REFERENCE if REFERENCE in losses else next(iter(losses)))


def loss_errors(result: CaseResult) -> list[str]:
    """Returns a sentence for every engine whose losses differ; its speed means nothing."""
    return [
        f"{result.case.name}: losses of {name}: expected those of the reference within "
        f"{LOSS_TOLERANCE[result.case.compute]:g}, got {row['losses']}. Do not compare its speed."
        for name, row in result.rows.items()
        if not row["equal_losses"]
    ]


# ---- the page ------------------------------------------------------------------------------------


def _case_entry(result: CaseResult) -> dict[str, object]:
    removed = result.removed
    return {
        **asdict(result.case),
        "others_share": result.neighbours.share,
        "loaded": result.neighbours.loaded,
        "removed_share": removed.to_dict() if removed else None,
        **{key: {name: row[key] for name, row in result.rows.items()} for key in RAW},
        "pilot_s": result.pilot_s,
        "unfit": result.unfit,
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    """An engine's row of the table, in the order of COLUMNS."""

    def shown(key: str, form: Callable[[Any], str]) -> str:
        return "-" if row[key] is None else form(row[key])

    prefetch = "" if row["prefetch"] is None else f" (prefetch {row['prefetch']})"
    return (
        row["case"],
        f"{row['name']}{prefetch}",
        row["strategy"],
        f"{row['step_time_s'] * 1e3:.1f}",
        f"{row['cpu_step_s'] * 1e3:.1f}",
        f"{row['tokens_per_s']:.0f}",
        shown("ratio_to_fsdp2", lambda ratio: str(Estimate(**ratio))),
        shown("memory_peak_bytes", lambda size: f"{size / MIB:.0f}"),
        shown("loss_difference", "{:.1e}".format),
    )


def notes_of(result: CaseResult) -> list[str]:
    """Returns the sentences about a case under the table."""
    notes = [f"{result.case.describe()}.", *loss_errors(result)]
    notes += [f"{name} is absent: {reason}." for name, reason in result.unfit.items()]
    if result.removed:
        notes.append(f"Removed share of FSDP2's overhead above the floor: {result.removed}.")
    return [*notes, str(result.neighbours)]


def page_of(results: Sequence[CaseResult], absent: Sequence[str], command: str) -> Page:
    """Returns the page of all cases.

    Args:
        results: One result per case.
        absent: Engines that are not installed.
        command: The command as typed.
    """
    rows: list[dict[str, Any]] = [
        {key: value for key, value in row.items() if key not in RAW}
        | {"loaded": result.neighbours.loaded}
        for result in results
        for row in result.rows.values()
    ]
    packages = {PEERS[row["name"]].package for row in rows}
    return Page(
        "step",
        "Training step, side by side",
        command,
        rows,
        COLUMNS,
        [_cells(row) for row in rows],
        METHOD,
        max((one.neighbours for one in results), key=lambda n: (n.loaded, n.share)),
        dict.fromkeys(absent, "It is not installed."),
        [" ".join(notes_of(result)) for result in results],
        versions=describe_versions(tuple(sorted({"torch", *packages}))),
        more={"cases": [_case_entry(result) for result in results]},
    )
