"""The parity check reports storage and reduction faults, each injected once from outside.

A fault is injected into the live objects of one run (the engine's transport, methods of a unit)
after the first step. The step before it must pass and the step with it must fail. Without a fault
the same check passes.
"""

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist

import fullshard as fs
from fullshard.engine.engine import engine_of
from fullshard.errors import FullshardError
from support.grid import STRATEGIES, marked
from support.models import CASES, generator_of, perturbed
from support.parity import mismatches, train_sharded
from support.ranks import on_ranks
from support.reference import train_alone

START = 1  # the step before which a fault is injected
CALL = 3  # call of fetch or reduce in that step: the second block's
UNIT = 2  # the second block


# ---- faults of a gather --------------------------------------------------------------------------


class Fetched:
    """A completed gather; `after` corrupts its result."""

    def __init__(self, fetch=None, after=None):
        self.fetch, self.after = fetch, after

    def wait(self):
        if self.fetch is not None:
            self.fetch.wait()
        if self.after is not None:
            self.after()


def once(holder, name, faulty):
    """Replaces one call of a method of this object by `faulty(method, *args)`."""
    method, calls = getattr(holder, name), itertools.count(1)

    def either(*args):
        return faulty(method, *args) if next(calls) == CALL else method(*args)

    setattr(holder, name, either)


def is_last_rank():
    return dist.get_rank() == dist.get_world_size() - 1


def stale_slot(engine, note):
    """On one rank a gather does not change its slot."""
    unit = engine.units[UNIT]
    gather = unit.start_gather

    def leaves_it():
        kept = [group.full.clone() for group in unit.groups]
        gather()
        unit.wait()  # receives the peers' messages
        for group, before in zip(unit.groups, kept, strict=True):
            group.full.copy_(before)
        note()

    if is_last_rank():
        unit.start_gather = leaves_it


def old_weights(engine, note):
    """On one rank a gather returns its own part from before the last update."""
    unit = engine.units[UNIT]
    old = [group.master.clone() for group in unit.groups]
    gather = unit.start_gather

    def brings_old():
        new = [group.master.clone() for group in unit.groups]
        if not all(map(torch.equal, old, new)):
            note()
        for group, values in zip(unit.groups, old, strict=True):
            group.master.copy_(values)
        gather()
        for group, values in zip(unit.groups, new, strict=True):
            group.master.copy_(values)

    if is_last_rank():
        unit.start_gather = brings_old


class NextSlot:
    """Rings that return the neighbour's slot of weights or of gradients."""

    def __init__(self, engine, gradients):
        self.rings, self.gradients = engine.rings, gradients
        self.counts = {ring.name: ring.count for ring in engine.plan.rings}

    def view(self, ref, numel):
        index = ref.index
        if ref.ring.endswith(".grad") is self.gradients:
            index = (index + 1) % self.counts[ref.ring]
        return self.rings.view(type(ref)(ref.ring, index, ref.base), numel)


def wrong_slot(engine, note, gradients=False):
    """A unit is bound to its neighbour's slot."""
    note()
    rings = NextSlot(engine, gradients)
    engine.units[UNIT].bind(rings, engine.runtime.on_gradient)


def skipped_gather(engine, note):
    """No rank sends or receives messages."""

    def skips(fetch, fulls, unit):
        note()
        return Fetched()

    once(engine.transport, "fetch", skips)


def part_of_a_wrong_rank(engine, note):
    """On one rank its own part replaces a peer's part."""

    def spoils(fetch, fulls, unit):
        parts, own = fulls[0].chunk(engine.plan.mesh.shard), engine.units[0].shard_index
        note()
        return Fetched(fetch(fulls, unit), lambda: parts[own - 1].copy_(parts[own]))

    if is_last_rank():
        once(engine.transport, "fetch", spoils)


# ---- faults of a reduction -----------------------------------------------------------------------


class Summing:
    """A reduction that writes its sums with `sum_into(outs)`."""

    def __init__(self, sum_into):
        self.sum_into = sum_into


def skipped_reduction(engine, note):
    """Every rank keeps its own gradient."""

    def skips(reduce, fulls):
        own = fulls[0].chunk(engine.plan.mesh.shard)[engine.units[0].shard_index].clone()
        note()
        return Summing(lambda outs: outs[0].copy_(own))

    if engine.plan.mesh.shard == 1:  # only the sum over replicas exists
        once(engine.transport, "sum_replicas", lambda sum_replicas, values: iter([note()]))
    else:
        once(engine.transport, "reduce", skips)


def lost_landing(engine, note):
    """On one rank the sum is not written."""

    def loses(reduce, fulls):
        under_way = reduce(fulls)
        note()
        return Summing(lambda outs: under_way.sum_into([torch.empty_like(out) for out in outs]))

    if is_last_rank():
        once(engine.transport, "reduce", loses)


def wrong_divisor(engine, note):
    """The mean is taken over one rank more than there are."""
    note()
    engine.gradients.divisor += 1


def repeated_gradient(engine, note):
    """One rank's gradient is counted twice."""

    def doubles(reduce, fulls):
        note()
        return reduce([2 * full for full in fulls])

    if is_last_rank():
        once(engine.transport, "reduce", doubles)


def gradient_of_a_wrong_part(engine, note):
    """On one rank the parts of a gradient are sent to the wrong ranks."""

    def rolls(reduce, fulls):
        note()
        return reduce([f.roll(f.numel() // engine.plan.mesh.shard) for f in fulls])

    if is_last_rank():
        once(engine.transport, "reduce", rolls)


def skipped_settling(engine, note):
    """The norms of the parts are not summed over ranks."""
    note()
    engine.transport.all_reduce = lambda values, **_: None


def lost_gradient(engine, note):
    """On one rank a gradient is not collected, but its slot is reduced."""
    gradients, unit = engine.gradients, engine.units[UNIT]
    collect = gradients.collect

    def loses(of, member):
        if of is unit and member is member.group.members[0]:
            gradient = torch.Tensor.grad.__get__(member.compute)
            lost = member.target if gradient is None else gradient
            lost.zero_()  # the target, or the tensor of autograd
            note()
        return collect(of, member)

    if is_last_rank():
        gradients.collect = loses


wrong_gradient_slot = partial(wrong_slot, gradients=True)
GATHERS = {
    "stale slot": stale_slot,
    "weights of the step before": old_weights,
    "wrong slot": wrong_slot,
    "skipped gather": skipped_gather,
    "part of a wrong rank": part_of_a_wrong_rank,
}
REDUCTIONS = {
    "wrong gradient slot": wrong_gradient_slot,
    "skipped reduction": skipped_reduction,
    "lost landing": lost_landing,
    "wrong divisor": wrong_divisor,
    "repeated gradient": repeated_gradient,
    "gradient of a wrong part": gradient_of_a_wrong_part,
    "skipped settling": skipped_settling,
    "lost gradient": lost_gradient,
}
FAULTS = {**GATHERS, **REDUCTIONS}
SHOWN_BY_POISON = ("stale slot", "skipped gather")  # unwritten elements are NaN
NOT_THERE = {  # nothing is gathered or sharded, and replicas sum whole buffers
    "no_shard": (*GATHERS, "gradient of a wrong part", "skipped settling"),
}


# ---- runs ----------------------------------------------------------------------------------------


def report_of(case, settings, fault, wanted):
    """Returns the parity report of a run with a fault, and how often the fault was applied here."""
    struck = []

    def work(model, step, rank):
        if step == START and fault is not None:
            fault(engine_of(model), lambda: struck.append(step))
        return case.work(model, step, rank)

    try:
        _, found = train_sharded(case.build, work, settings)
        lines = mismatches(found, wanted)
    except (AssertionError, FullshardError) as error:
        lines = [f"step ?: {type(error).__name__}: {error}"]
    return lines, len(struck)


def reports(name, strategy, poison, which):
    """Returns (lines, strikes) by fault on this rank; the first entry has no fault.

    These are faults of filled slots; test_shared_home.py covers ranks that share one copy.
    """
    settings = {"strategy": strategy, "poison": poison, "transport": "direct"}
    if strategy.startswith("hybrid"):
        settings["replicate"] = 2
    case = CASES[name]
    wanted = train_alone(case.build, case.work, world_size=dist.get_world_size())
    assert report_of(case, settings, None, wanted) == ([], 0)
    return {fault: report_of(case, settings, FAULTS[fault], wanted) for fault in which}


def assert_caught(found, poison):
    """Each fault was applied and reported on every rank; `poison` says whether as NaN."""
    for fault in found[0]:
        strikes = sum(by_rank[fault][1] for by_rank in found)
        assert strikes, f"{fault} was never injected"
        everything = [line for by_rank in found for line in by_rank[fault][0]]
        for rank, by_rank in enumerate(found):
            lines = by_rank[fault][0]
            assert lines, f"{fault}: rank {rank} saw nothing"
            early = [line for line in lines if line.startswith("step 0")]
            assert not early, f"{fault}: reported before it was injected: {early}"
        if fault in SHOWN_BY_POISON and poison is not None:
            is_nan = any("differs by inf" in line for line in everything)
            assert is_nan is poison, (fault, everything[:5])


HALVES = [0, pytest.param(1, marks=pytest.mark.long)]  # each of two models has half of the faults


@pytest.mark.short(1)  # with poison: tested on a language model below
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    ("strategy", "world_size", "poison"),
    marked(
        itertools.product(STRATEGIES, (2, 3), (False, True)),
        lambda strategy, ranks, poison: ranks == 2 and (strategy == "full_shard" or not poison),
    ),
)
def test_every_injected_fault_is_reported(ranks, strategy, world_size, poison, half):
    which = [name for name in list(FAULTS)[half::2] if name not in NOT_THERE.get(strategy, ())]
    found = ranks(world_size)(reports, "chain", strategy, poison, which, timeout=100)
    assert_caught(found, poison)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_shard_zero2"])
def test_every_injected_fault_is_reported_where_shards_are_replicated(ranks, strategy):
    found = ranks(4)(reports, "chain", strategy, True, list(FAULTS), timeout=100)
    assert_caught(found, poison=None)  # replicas are compared before NaN is noticed


@pytest.mark.parametrize("half", HALVES)
def test_faults_are_reported_on_a_language_model(ranks, half):
    which = list(FAULTS)[1 - half :: 2]
    found = ranks(2)(reports, "llama", "full_shard", True, which, timeout=100)
    assert_caught(found, poison=True)


# ---- faults outside the engine: equal data, weights that hide a fault ----------------------------


@on_ranks(2)
def test_a_rank_with_another_ranks_data_is_reported():
    """Every rank gets the first rank's batch."""
    case = CASES["chain"]
    world_size = dist.get_world_size()
    wanted = train_alone(case.build, case.work, world_size=world_size)
    _, found = train_sharded(case.build, lambda model, step, _: case.work(model, step, 0), {})
    lines = mismatches(found, wanted)
    assert any("gradient of" in line for line in lines)


def report_of_unperturbed_weights():
    """Returns whether a wrong part changes the output: weights all ones, perturbed."""
    found = []
    for disturb in (False, True):
        norm = torch.nn.RMSNorm(256, dtype=torch.float64)
        model = perturbed(norm) if disturb else norm
        fs.shard(model, wrap="none", poison=True, transport="direct")
        part_of_a_wrong_rank(engine_of(model), lambda: None)
        x = torch.randn(4, 256, generator=generator_of(0, 0), dtype=torch.float64)
        with torch.no_grad():
            outputs = [model(x) for _ in range(CALL)]
        found.append(torch.equal(outputs[0], outputs[-1]))
    return found


def test_equal_weights_hide_a_wrong_part(ranks):
    assert ranks(2)(report_of_unperturbed_weights)[-1] == [True, False]
