"""Transports move the same bits, and sum in rank order."""

import importlib.util
import math
import warnings
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import fullshard as fs
from fullshard.config import values
from fullshard.config.schema import ShardConfig
from fullshard.config.values import TransportKind
from fullshard.engine.engine import engine_of
from fullshard.errors import EngineError
from fullshard.planner.mesh import Mesh
from fullshard.transport import _torch_compat, c10d
from fullshard.transport.base import Works
from fullshard.transport.groups import make_transport
from support.grid import STRATEGIES, chequered
from support.models import chain, float32_case, mean_square, vectors
from support.parity import assert_planned_events, train_sharded
from support.rank_worker import COLLECTIVE_TIMEOUT
from support.ranks import on_ranks

ORDERED = {"transport": "c10d", "reduction": "ordered"}
NATIVE = {"transport": "c10d", "reduction": "native"}


def bits_of(case, settings):
    """Returns gradients, norms and parameters after each step."""
    model, steps = train_sharded(case.build, case.work, settings)
    assert engine_of(model).transport.name == settings["transport"]
    return steps


def differing(ours, theirs):
    """Returns the tensors that differ in any bit."""
    wrong = []
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for kind in ("gradients", "params"):
            left, right = getattr(a, kind), getattr(b, kind)
            assert left.keys() == right.keys()
            wrong += [f"{number} {n}" for n in left if not torch.equal(left[n], right[n])]
        if not torch.equal(a.norm, b.norm):
            wrong.append(f"{number} norm")
    return wrong


def check_bits(name, settings):
    """Checks that all but the native sum agree bit for bit; that one is compared separately."""
    case = float32_case(name)
    direct = bits_of(case, {**settings, "transport": "direct"})
    if settings["strategy"] != "no_shard" and settings.get("replicate") != 4:
        for shared in ({"transport": "shared"}, {"transport": "shared", "offload": "cpu"}):
            assert not differing(direct, bits_of(case, settings | shared))
    assert not differing(direct, bits_of(case, {**settings, **ORDERED}))
    native = bits_of(case, {**settings, **NATIVE})
    for ours, theirs in zip(native, direct, strict=True):
        for wanted in ("gradients", "params"):
            for key, value in getattr(theirs, wanted).items():
                torch.testing.assert_close(
                    getattr(ours, wanted)[key], value, rtol=1e-4, atol=1e-6, msg=key
                )
    return len(differing(native, direct))


@pytest.mark.short(1)
@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        ("chain", 2),
        ("chain", 3),
        pytest.param("llama", 2, marks=pytest.mark.slow),
        pytest.param("chain", 4, marks=pytest.mark.slow),
        pytest.param("llama", 3, marks=pytest.mark.slow),
        pytest.param("llama", 4, marks=pytest.mark.slow),
    ],
)
@on_ranks("world_size", timeout=100)
def test_transports_agree_bit_for_bit_and_the_native_sum_within_rounding(name):
    size = dist.get_world_size()
    settings = [{"strategy": strategy} for strategy in STRATEGIES]
    if size == 4:
        settings += [{"strategy": "hybrid_shard", "replicate": number} for number in (1, 2, 4)]
    for fields in settings:
        count = check_bits(name, fields)
        assert size > 2 or count == 0  # a sum of two has one order


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
@on_ranks("world_size")
def test_bits_agree_with_bfloat16_on_the_wire():
    settings, case = {"param_dtype": "bf16", "reduce_dtype": "bf16"}, float32_case("chain")
    direct = bits_of(case, {**settings, "transport": "direct"})
    for other in ({"transport": "shared"}, ORDERED):
        assert differing(direct, bits_of(case, settings | other)) == []


@on_ranks(2)
def test_the_backend_reduces_into_the_slot_that_it_reads():
    scatter, seen = c10d.reduce_scatter_many, []

    def noted(parts, fulls, group):
        seen.extend(
            part.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
            for part, full in zip(parts, fulls, strict=True)
        )
        return scatter(parts, fulls, group)

    with patch.object(c10d, "reduce_scatter_many", noted):
        bits_of(float32_case("chain"), NATIVE)
    assert seen
    assert all(seen)


def sums_of_many(most_rounded):
    """Returns how `auto` differs from `direct` if this many ranks may be summed in bfloat16."""
    case, found = float32_case("chain"), []
    settings = {"param_dtype": "bf16", "reduce_dtype": "bf16", "fp32_modules": ["blocks.0.norm"]}
    with patch.object(values, "MOST_ROUNDED", most_rounded):
        direct = bits_of(case, {**settings, "transport": "direct"})
        for mode in ("auto", "native"):
            auto = bits_of(case, {**settings, "transport": "c10d", "reduction": mode})
            found.append(bool(differing(direct, auto)))
    return found


def test_bfloat16_of_many_ranks_is_summed_float32_case(ranks):
    auto = values.ReductionKind.AUTO
    assert [auto.is_ordered(2, number) for number in (8, 9)] == [False, True]
    assert not auto.is_ordered(4, 512)
    assert ranks(3)(sums_of_many, 2) == [[False, True]] * 3
    assert ranks(3)(sums_of_many, 3) == [[True, True]] * 3


@pytest.mark.parametrize(
    ("more", "reduction"),
    chequered([{}, {"strategy": "hybrid_shard", "replicate": 2}], ["ordered", "native"]),
    ids=str,
)
@on_ranks(4)
def test_receive_buffers_of_c10d_are_planned(reduction, more):
    settings = {"transport": "c10d", "reduction": reduction, "reduce_dtype": "bf16", **more}
    model = fs.shard(chain().float(), wrap=["Block"], **settings)
    for step in range(3):
        mean_square(model(vectors(step, dist.get_rank())["x"].float())).backward()
        model.zero_grad()
    rows = {row.name: row.num_bytes for row in engine_of(model).plan.memory}
    used = fs.memory_stats(model)["communication_buffers"]["now"]
    assert rows["communication buffers"] == used
    assert (used > 0) is (reduction == "ordered")  # the others are received in gradient slots


# ---- runs repeat ---------------------------------------------------------------------------------


@pytest.mark.short(1)
@pytest.mark.parametrize(
    "transport", [{"transport": "shared"}, {"transport": "direct"}, ORDERED, NATIVE]
)
@on_ranks(3)
def test_the_same_ranks_give_the_same_bits_again(transport):
    case = float32_case("chain")
    first, again = (bits_of(case, transport) for _ in range(2))
    assert differing(first, again) == []


# ---- one process simulates a rank of any world ---------------------------------------------------


def step_alone(model, step):
    """Returns gradients of one step on rank 0's batch, in the shape of `p.grad`."""
    loss = mean_square(model(**vectors(step, 0)))
    loss.backward()
    return [p.grad.to_local().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("sizes", "strategy"),
    [
        ({"shard": 1}, "full_shard"),
        ({"shard": 3}, "full_shard"),
        ({"shard": 64}, "full_shard"),
        ({"shard": 1000}, "full_shard"),
        ({"shard": 64}, "shard_grad_op"),
        ({"replicate": 64}, "no_shard"),
        ({"replicate": 8, "shard": 8}, "hybrid_shard"),
        ({"replicate": 3, "shard": 5}, "hybrid_shard_zero2"),
    ],
)
def test_fake_ranks_run_the_plan_of_any_world(sizes, strategy):
    model = fs.shard(chain(), transport="fake", poison=True, strategy=strategy, **sizes)
    optimizer = torch.optim.AdamW(model.parameters())
    world_size = math.prod(sizes.values())
    engine = engine_of(model)
    assert engine.plan.mesh.world_size == world_size
    assert engine.plan.transport is TransportKind.FAKE
    settings = {"transport": "fake", "strategy": strategy, **sizes}
    wanted = fs.plan(chain(), world_size=world_size, **settings)
    for step in range(3):
        step_alone(model, step)
        optimizer.step()
        optimizer.zero_grad()
        assert_planned_events(model, step)
    assert engine.plan.events == wanted.events
    assert all(torch.isfinite(p.to_local()).all() for p in model.parameters())


def test_fake_ranks_receive_what_the_plan_says():
    """Bytes of a gather approach the whole unit, bytes of a rank's part approach zero."""
    for size in (2, 8, 64):
        plan = fs.plan(chain(), world_size=size, transport="fake")
        layout = plan.units[1].groups[0].layout
        gathers = {e.num_bytes for e in plan.events if e.kind == "gather" and e.unit == 1}
        reduces = {e.num_bytes for e in plan.events if e.kind == "reduce" and e.unit == 1}
        assert gathers == reduces == {8 * (layout.numel - layout.part_numel)}


def equal_ranks(settings):
    """Every rank gets the first rank's batch for three steps in float32."""
    case, found = float32_case("chain"), []
    model = fs.shard(case.build(), strategy="no_shard", **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        case.work(model, step, 0)
        found += [p.grad.to_local().clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        found += [p.to_local().clone() for p in model.parameters()]
    return found


def test_a_fake_reduction_has_the_bits_of_equal_ranks(ranks):
    fake = equal_ranks({"transport": "fake", "replicate": 3})
    for real in ranks(3)(equal_ranks, {"transport": "direct"}):
        assert len(fake) == len(real)
        assert all(map(torch.equal, fake, real))


# ---- both spellings of torch's single-tensor collectives -----------------------------------------

SPELLINGS = {
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}


def compat_without_new_names():
    """Returns the module as imported by a torch without the new names."""
    kept = {name: vars(dist).pop(name) for name in SPELLINGS if name in vars(dist)}
    try:
        spec = importlib.util.spec_from_file_location("old_compat", _torch_compat.__file__)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        vars(dist).update(kept)
    return module


@on_ranks(2)
def test_both_spellings_do_the_same():
    rank = dist.get_rank()
    for compat in (_torch_compat, compat_without_new_names()):
        whole, part = torch.empty(8), torch.empty(4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 warns of the old names
            compat.all_gather_single(whole, torch.arange(4.0) + 10 * rank)
            compat.reduce_scatter_single(part, whole * (rank + 1))
        assert torch.equal(whole, torch.tensor([0.0, 1, 2, 3, 10, 11, 12, 13]))
        assert torch.equal(part, 3 * whole[4 * rank : 4 * rank + 4])


@on_ranks(2)
def test_groups_wait_as_long_as_the_one_that_the_user_made():
    model = fs.shard(chain(), transport="c10d")
    model(torch.ones(1, 12, dtype=torch.float64))
    axes, cpu = engine_of(model).transport.axes, torch.device("cpu")
    groups = axes.gather_group, axes.reduce_group, axes.world_group
    assert {g._get_backend(cpu).options._timeout for g in groups} == {COLLECTIVE_TIMEOUT}


def test_failed_messages_are_not_awaited_again():
    waits = []

    class Work:
        def wait(self):
            waits.append("work")

    def compare():
        waits.append("compare")
        raise EngineError("ranks differ")

    works = Works([Work()], "a forward", compare)
    with pytest.raises(EngineError, match="ranks differ"):
        works.wait()
    works.wait()  # gloo would wait for another message until the time-out
    assert waits == ["compare"]


def begins_before_its_peer(kind, reduction):
    """Rank 1 starts a sum over replicas only after rank 0 started; both end."""
    config = ShardConfig(transport=TransportKind(kind), reduction=reduction)
    transport, values = make_transport(config, Mesh(2, 1)), torch.ones(256)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait([f"begun {kind} {reduction}"])
    steps = transport.sum_replicas(values)
    next(steps)
    store.set(f"begun {kind} {reduction}", "")
    for _ in steps:
        pass
    return values.unique().tolist()


@pytest.mark.parametrize(
    ("kind", "reduction"), [("direct", "ordered"), ("c10d", "native"), ("c10d", "ordered")]
)
def test_a_sum_over_replicas_starts_without_waiting_for_peers(ranks, kind, reduction):
    assert ranks(2)(begins_before_its_peer, kind, reduction, timeout=20) == [[2.0], [2.0]]
