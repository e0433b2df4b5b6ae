"""Advice fits, is faster, and trains the same model."""

import functools
from dataclasses import replace

import pytest

from fullshard.config.sharding import ShardConfig
from fullshard.config.values import DType, Strategy
from fullshard.errors import WillNotFitError
from fullshard.outlook.devices import DEVICES
from fullshard.outlook.memory import GIB, Fit
from fullshard.outlook.predict import Machine, PlannedStep, look
from fullshard.outlook.search import MICRO_BATCH, advise, choose, compare, study
from fullshard.outlook.workload import Batch, Shapes, decoder
from fullshard.planner.mesh import Topology
from fullshard.planner.optimizers import SGD
from fullshard.planner.plan import make_plan
from fullshard.planner.spec import ModelSpec, ModuleSpec, ParamSpec

WIDTH, LAYERS, VOCAB = 2048, 24, 32000
H100 = Machine(DEVICES["H100"], 80 * GIB)


def decoder_spec():
    """Blocks of two matrices between an embedding and a head."""
    modules = [
        ModuleSpec("", "Decoder"),
        ModuleSpec("embed", "Embedding", reads_weight_in_backward=False),
    ]
    params = [ParamSpec(("embed.weight",), (VOCAB, WIDTH), DType.FLOAT32, trainable=True)]
    modules.append(ModuleSpec("layers", "ModuleList", is_container=True, can_be_unit=False))
    for index in range(LAYERS):
        modules.append(ModuleSpec(f"layers.{index}", "Block"))
        for name, shape in (("up", (6 * WIDTH, WIDTH)), ("down", (WIDTH, 6 * WIDTH))):
            modules.append(ModuleSpec(f"layers.{index}.{name}", "Linear"))
            names = (f"layers.{index}.{name}.weight",)
            params.append(ParamSpec(names, shape, DType.FLOAT32, trainable=True))
    modules.append(ModuleSpec("head", "Linear"))
    params.append(ParamSpec(("head.weight",), (VOCAB, WIDTH), DType.FLOAT32, trainable=True))
    return ModelSpec("Decoder", tuple(modules), tuple(params))


SPEC = decoder_spec()
TOPOLOGY = Topology(8, 8)


@functools.cache
def _plan(strategy, offload, recompute):
    return make_plan(
        SPEC,
        ShardConfig(
            strategy=strategy,
            offload="cpu" if offload else None,
            activation_checkpointing=str(recompute),
            param_dtype="bf16",
        ),
        TOPOLOGY,
    )


def plan_of(config):
    return _plan(config.strategy, config.offload is not None, config.activation_checkpointing)


def job(micro_batch, seq_len=2048):
    shapes = Shapes(SPEC.numel, LAYERS, WIDTH, 16, 16, 4 * WIDTH, VOCAB)
    return PlannedStep(decoder(shapes), Batch(seq_len, micro_batch, 1))


def current(micro_batch, machine=H100, **changes):
    config = ShardConfig(**{"strategy": "full_shard", "param_dtype": "bf16", **changes})
    return look(plan_of(config), config, job(micro_batch), machine)


def samples(outlook):
    return outlook.job.batch.micro_batch * outlook.job.batch.accumulation


def test_a_run_that_does_not_fit_gets_fitting_changes_cheapest_first():
    before = current(64)
    assert before.fit is Fit.NO
    advice = advise(before, plan_of)
    assert advice
    assert [len(one.changes) for one in advice] == sorted(len(one.changes) for one in advice)
    for one in advice:
        assert one.outlook.fit is not Fit.NO
        assert samples(one.outlook) == samples(before)


def test_a_run_that_fits_gets_faster_changes_that_fit():
    before = current(8, activation_checkpointing="block")
    assert before.fit is Fit.FITS
    for one in advise(before, plan_of):
        assert one.outlook.fit is Fit.FITS
        assert one.outlook.step_time_s < before.step_time_s
        assert samples(one.outlook) == samples(before)
    assert advise(before, plan_of)


@pytest.mark.parametrize("memory_gib", [80, 40])
def test_candidates_too_slow_to_be_chosen_are_not_traced(memory_gib):
    """A trace takes a second; `plan` of 405B parameters would run 32."""
    traced = []

    def trace(plan, config, samples):
        traced.append((str(config.activation_checkpointing), samples))

    machine = replace(H100, memory_bytes=memory_gib * GIB)
    config = ShardConfig(param_dtype="bf16", activation_checkpointing="block")
    before = look(plan_of(config), config, replace(job(8), trace=trace), machine)
    traced.clear()
    advice = advise(before, plan_of)
    assert len(traced) <= 8  # of 24 candidates
    assert advice[0].outlook.step_time_s < before.step_time_s
    traced.clear()
    chosen = choose(before, plan_of, ["strategy", MICRO_BATCH])
    assert chosen.fit is Fit.FITS
    assert traced == [("block", chosen.job.batch.micro_batch)]  # the fastest candidate


def test_advice_gives_the_arguments_to_add():
    (first, *_) = advise(current(64), plan_of)
    assert all("=" in word for word in first.words.split())
    assert first.sentence(current(64)).startswith(first.words)


@pytest.mark.parametrize(("bytes_a_parameter", "is_tried"), [(11, True), (1, False)])
def test_copies_are_left_out_only_where_not_even_weights_fit(bytes_a_parameter, is_tried):
    machine = Machine(None, bytes_a_parameter * SPEC.numel)
    config = ShardConfig(strategy="full_shard", param_dtype="bf16")
    before = look(plan_of(config), config, replace(job(1, 128), optimizer=SGD), machine)
    found = {one.config.strategy: one for one in compare(before, plan_of)}
    assert (Strategy.NO_SHARD in found) is is_tried
    assert not is_tried or found[Strategy.NO_SHARD].plan.optimizer is SGD


def test_offload_is_advised_only_where_nothing_else_fits():
    roomy = advise(current(64), plan_of)
    assert not any("sharding.offload" in one.changes for one in roomy)
    small = Machine(DEVICES["H100"], 5 * GIB)
    tight = advise(current(1, small), plan_of)
    assert all("sharding.offload" in one.changes for one in tight)


def test_no_advice_is_given_without_a_named_device():
    unknown = Machine(None, None)
    assert advise(current(64, unknown), plan_of) == []
    assert current(64, unknown).fit is None
    assert current(64, unknown).step_time_s is None


def test_a_choice_changes_only_open_settings():
    chosen = choose(current(4), plan_of, ["strategy"])
    assert chosen.config.activation_checkpointing == current(4).config.activation_checkpointing
    assert chosen.job == current(4).job
    assert chosen.step_time_s <= current(4).step_time_s


def test_a_choice_of_micro_batches_keeps_the_samples_and_takes_the_largest_that_fit():
    unknown = Machine(None, H100.memory_bytes)  # a device of unknown speed
    before = current(64, unknown)
    chosen = choose(before, plan_of, [MICRO_BATCH])
    assert samples(chosen) == samples(before)
    assert chosen.fit is Fit.FITS
    assert chosen.config == before.config
    twice = replace(before.job.batch, micro_batch=2 * chosen.job.batch.micro_batch)
    larger = look(chosen.plan, chosen.config, replace(before.job, batch=twice), unknown)
    assert larger.fit is not Fit.FITS


@pytest.mark.parametrize("recompute", ["none", "selective", "every_2"])
def test_a_choice_keeps_the_requested_recompute(recompute):
    unknown = Machine(None, H100.memory_bytes)
    before = current(64, unknown, activation_checkpointing=recompute)
    chosen = choose(before, plan_of, [MICRO_BATCH])
    assert chosen.config.activation_checkpointing == before.config.activation_checkpointing
    assert chosen.fit is Fit.FITS
    assert samples(chosen) == samples(before)
    assert chosen.job.batch.accumulation > 1


def test_a_choice_that_nothing_fits_is_refused_with_the_smallest():
    small = Machine(DEVICES["H100"], GIB)
    with pytest.raises(WillNotFitError, match=r"expected a choice of strategy that fits 1\.0 GiB"):
        choose(current(64, small), plan_of, ["strategy"])
    here = Machine(None, -1, is_host=True, process_bytes=9 << 20, limit="the limit")
    where = "fits 0 B per rank of the limit, without 9.0 MiB for its processes; the smallest"
    with pytest.raises(WillNotFitError, match=where):
        choose(current(64, here), plan_of, ["strategy"])


def test_rows_of_memory_add_up_and_keep_the_plans_own():
    outlook = current(4)
    assert sum(row.num_bytes for row in outlook.rows) == outlook.peak_bytes["device"]
    assert outlook.rows[: len(outlook.plan.memory)] == outlook.plan.memory
    assert outlook.reserved_bytes >= outlook.peak_bytes["device"]


def studied(config, work, machine=H100):
    outlook = look(plan_of(config), config, work, machine)
    return study(outlook, lambda config, _: plan_of(config), TOPOLOGY)


@pytest.mark.parametrize("memory_bytes", [GIB // 4, 2 * GIB, 3 * GIB])
def test_a_run_of_any_size_that_does_not_fit_gets_advice(memory_bytes):
    config = ShardConfig(strategy="full_shard")
    machine = Machine(None, memory_bytes)
    outlook = look(plan_of(config), config, job(8, 512), machine)
    assert outlook.fit is Fit.NO

    def plan_at(config, topology):
        return make_plan(SPEC, config, topology)

    advice = study(outlook, plan_at, TOPOLOGY).advice
    assert advice
    for one in advice:
        if one.changes:
            assert one.outlook.fit is not Fit.NO
        else:
            assert len(advice) == 1
            assert "a smaller model" in one.sentence(outlook)


def test_a_step_without_a_forecast_has_no_time():
    config = ShardConfig(param_dtype="bf16")
    known, unknown = job(1, 512), replace(job(1, 512), is_timed=False)
    assert look(plan_of(config), config, known, H100).step_time_s is not None
    found = studied(config, unknown)
    assert found.outlook.step_time_s is None
    assert found.scaling == []


def test_scaling_reports_time_lost_to_communication():
    config = ShardConfig(param_dtype="bf16")
    points = studied(config, job(1, 512)).scaling
    assert points[-1].efficiency < 0.9
    assert points[-1].reason == "exposed communication"
    assert points[-1].peak_bytes < points[0].peak_bytes
