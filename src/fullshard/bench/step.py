"""`fullshard bench step`: runs the engines side by side and gathers what the ranks measured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

import numpy as np

from fullshard.bench import memory, ranks
from fullshard.bench.cases import REFERENCE, Case, Compute, Peer, groups_of, unfit_of
from fullshard.bench.machine import CpuClock, available_bytes, others_share, wait_until_idle
from fullshard.bench.statistics import largest_difference

MEASURE = "fullshard.bench.step_rank:measure"
WAIT_LIMIT_S = 600.0
# Losses of float32 runs differ by the order of sums; a wrong gradient shows at the third digit.
# In bfloat16 another order of sums rounds a weight to its neighbour, 0.4 % away.
LOSS_TOLERANCE: dict[Compute, float] = {"float32": 2e-5, "bfloat16": 5e-4}

# Of the forecast of how long it takes: a group's start, untimed steps, a step over its products.
START_S, FIRST_STEPS, OVERHEAD = 15.0, 5, 1.2

Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """What one group of ranks measures.

    Attributes:
        mode: "time" (all engines in turn) or "memory" (one engine alone).
        num_checked: first steps, whose losses are compared; they warm up as well.
        num_rounds: timed steps of every engine.
        prefetch: FSDP2's prefetch distance by engine name; None: a pilot chooses it.
    """

    case: Case
    engines: tuple[str, ...]
    mode: str
    num_rounds: int
    num_checked: int = 3
    seed: int = 0
    learning_rate: float = 1e-3
    prefetch: dict[str, int] | None = None


@dataclass(frozen=True)
class MemoryFigures:
    """Peaks over the baseline, of the rank that needed most.

    Attributes:
        peak_bytes: proportional set size during the steps.
        resident_peak_bytes: resident set during the steps, shared pages counted by every rank.
        build_peak_bytes: proportional set size while the model was built and sharded.
    """

    peak_bytes: int
    resident_peak_bytes: int
    build_peak_bytes: int


@dataclass(frozen=True)
class EngineResult:
    """What was measured of one engine.

    Attributes:
        times_s: one timed step a round; the same round of all engines is one pair.
        paired_s: FSDP2's times in the same rounds, the other side of the ratio.
        cpu_s: processor seconds of one rank and step: the median round, the mean of the ranks.
        losses: the mean over the ranks in the first steps.
        loss_difference: the largest relative one to FSDP2's losses; None where nothing is trained.
        tolerance: the largest difference that the case's dtype explains.
        prefetch: FSDP2's chosen distance, None elsewhere.
    """

    peer: Peer
    times_s: tuple[float, ...]
    paired_s: tuple[float, ...] | None
    cpu_s: float
    losses: tuple[float, ...]
    loss_difference: float | None
    prefetch: int | None = None
    memory: MemoryFigures | None = None
    tolerance: float = LOSS_TOLERANCE["float32"]

    @property
    def has_equal_losses(self) -> bool:
        """Whether it trains what the reference trains; not so where a loss is NaN."""
        return self.loss_difference is None or self.loss_difference <= self.tolerance


@dataclass(frozen=True)
class CaseResult:
    """What was measured of one case.

    Attributes:
        others_share: share of all cores that other processes used during the timed rounds.
        became_idle: False if --wait gave up.
        pilot_s: FSDP2's best step by prefetch distance.
        unfit: engines that cannot run this case, with the reason.
    """

    case: Case
    engines: tuple[EngineResult, ...]
    others_share: float
    became_idle: bool
    pilot_s: dict[str, float] = field(default_factory=dict)
    unfit: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Options:
    """How to measure."""

    num_rounds: int = 11
    measure_memory: bool = True
    wait: bool = False
    timeout_s: float = 1800.0


def run_ranks(job: Job, timeout_s: float) -> list[dict]:
    """Runs one group of ranks and returns what each of them measured.

    Raises:
        FullshardError: a rank failed; its own error has been shown.
    """
    what = f"bench step: the ranks of {job.case.name} ({job.mode}: {', '.join(job.engines)})"
    return ranks.run_ranks(MEASURE, job, job.case.num_ranks, what=what, timeout_s=timeout_s)


def loss_differences(losses: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Returns every engine's largest relative difference to FSDP2's losses, or to the first's."""
    if not losses:
        return {}
    return largest_difference(losses, REFERENCE if REFERENCE in losses else next(iter(losses)))


def loss_errors(result: CaseResult) -> list[str]:
    """Returns a sentence for every engine that trains something else; its speed means nothing."""
    return [
        f"{result.case.name}: losses of {engine.peer.name}: expected those of the reference within "
        f"{engine.tolerance:g}, got {list(engine.losses)}, which differ by "
        f"{engine.loss_difference:.1e}. Do not compare its speed."
        for engine in result.engines
        if not engine.has_equal_losses
    ]


def _others_share(results: list[dict]) -> float:
    start, end = (CpuClock(**reading) for reading in results[0]["clock"])
    return others_share(start, end, sum(result["own_cpu_s"] for result in results))


def _measure_memory(job: Job, timeout_s: float) -> MemoryFigures:
    results = run_ranks(job, timeout_s)
    return MemoryFigures(
        peak_bytes=max(r["peak_bytes"] for r in results),
        resident_peak_bytes=max(r["resident_peak_bytes"] for r in results),
        build_peak_bytes=max(r["build_peak_bytes"] for r in results),
    )


def _time_group(
    case: Case, group: Sequence[Peer], prefetch: dict[str, int] | None, options: Options
) -> list[dict]:
    """Times the engines of a group in turn."""
    names = tuple(peer.name for peer in group)
    job = Job(case, names, "time", options.num_rounds, prefetch=prefetch)
    return run_ranks(job, options.timeout_s)


def _engine_results(
    case: Case, group: Sequence[Peer], results: list[dict]
) -> dict[str, EngineResult]:
    losses = {peer.name: results[0]["losses"][peer.name] for peer in group if peer.trains}
    differences = loss_differences(losses)
    found = {peer.name: _engine_result(peer, results, differences.get(peer.name)) for peer in group}
    tolerance = LOSS_TOLERANCE[case.compute]
    return {name: replace(engine, tolerance=tolerance) for name, engine in found.items()}


def _engine_result(peer: Peer, results: list[dict], difference: float | None) -> EngineResult:
    times_s = results[0]["times_s"]
    return EngineResult(
        peer=peer,
        times_s=tuple(times_s[peer.name]),
        paired_s=tuple(times_s[REFERENCE]) if REFERENCE in times_s else None,
        cpu_s=fmean(median(result["cpu_times_s"][peer.name]) for result in results),
        losses=tuple(results[0]["losses"][peer.name]),
        loss_difference=difference,
        prefetch=results[0]["prefetch"].get(peer.name),
    )


def expected_s(cases: Sequence[Case], peers: Sequence[Peer], options: Options) -> float:
    """About how long the cases take here: 6 FLOPs per parameter and token at a product's speed."""
    flops_per_s = _flops_per_s()
    total = 0.0
    for case in cases:
        num_engines = len(peers) - len(unfit_of(case, peers))
        num_groups = len(groups_of(peers, case, available_bytes() * 6 // 10))
        step_s = OVERHEAD * 6 * case.numel * case.tokens_per_step / flops_per_s
        total += num_groups * START_S + num_engines * (options.num_rounds + FIRST_STEPS) * step_s
        total += options.measure_memory * num_engines * (START_S + FIRST_STEPS * step_s)
    return total


def _flops_per_s() -> float:
    """Of a product of two matrices on all cores, by processor time; the best of five."""
    width = 1024
    matrix = np.ones((width, width), np.float32)
    times = []
    for _ in range(5):
        began = time.process_time()
        np.matmul(matrix, matrix)
        times.append(time.process_time() - began)
    return len(os.sched_getaffinity(0)) * 2 * width**3 / min(times)


def run_case(case: Case, peers: Sequence[Peer], options: Options, say: Say) -> CaseResult:
    """Measures one case: engines in turn, group by group, then each alone for its memory."""
    unfit = unfit_of(case, peers)
    peers = [peer for peer in peers if peer.name not in unfit]
    became_idle = wait_until_idle(WAIT_LIMIT_S, say) if options.wait else True
    found: dict[str, EngineResult] = {}
    prefetch, pilot_s, share = None, {}, 0.0
    for group in groups_of(peers, case, available_bytes() * 6 // 10):
        names = ", ".join(peer.name for peer in group)
        say(f"{case.describe()}: {options.num_rounds} rounds of {names}")
        results = _time_group(case, group, prefetch, options)
        prefetch, pilot_s = results[0]["prefetch"], pilot_s or results[0]["pilot_s"]
        share = max(share, _others_share(results))
        found = _engine_results(case, group, results) | found  # FSDP2's row is the first group's
    if options.measure_memory and memory.can_measure():
        for peer in peers:
            say(f"{case.name}: memory of {peer.name}, alone")
            job = Job(case, (peer.name,), "memory", 0, prefetch=prefetch)
            figures = _measure_memory(job, options.timeout_s)
            found[peer.name] = replace(found[peer.name], memory=figures)
    engines = tuple(found[peer.name] for peer in peers)
    return CaseResult(case, engines, share, became_idle, pilot_s, unfit)
