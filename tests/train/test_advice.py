"""Advice of the plan has the promised effect: runs with a memory limit follow it."""

import pytest
import torch.distributed as dist
from benchmarks.memory import MemoryCase
from benchmarks.memory_rank import live_peak_bytes, train

import fullshard as fs
from fullshard.config.load import load_config
from fullshard.models.build import given_model_config, model_on_meta
from fullshard.outlook.memory import Fit
from fullshard.outlook.predict import Machine, look
from fullshard.outlook.search import advise
from fullshard.planner.mesh import Topology
from fullshard.planner.units import Place
from fullshard.recipes.distill.recipe import settings_of
from fullshard.recipes.registry import Command
from fullshard.run import outlook as train_outlook
from fullshard.run import start
from fullshard.run.outlook import job_of, view_of

TOLERANCE = 0.03
PLENTY = 1 << 40
# Shares of the memory of a replicated llama without recompute, which need ever more changes.
SHARES = (0.85, 0.6, 0.4)
AUTO = ["strategy=auto", "per_device_train_batch_size=auto", "train_batch_size=8"]


def told(words, memory_bytes):
    """Returns the output of `fullshard plan` for a device of this size."""
    config = load_config(None, words).config
    model = model_on_meta(config, given_model_config(config))
    world_size = dist.get_world_size()

    def plan_of(sharding):
        return fs.plan(model, sharding, world_size=world_size)

    machine = Machine(None, memory_bytes)
    chunk_size = settings_of(config).tokens_at_once  # as in a run
    job = job_of(model, config.training, world_size, chunk_size=chunk_size)
    outlook = look(plan_of(config.sharding), config.sharding, job, machine)
    return outlook, advise(outlook, plan_of)


def measured(words):
    """Returns the peak of a run."""
    config = load_config(None, words).config
    return live_peak_bytes(lambda: train(config))


def followed(share, count):
    """Runs a job that does not fit, then follows its first `count` advices as a user would."""
    words = MemoryCase("llama", "no_shard", "none").words()
    needed, _ = told(words, PLENTY)
    memory_bytes = round(share * needed.peak_bytes[Place.DEVICE])
    before, advice = told(words, memory_bytes)
    runs = [
        {
            "words": one.words,
            "fit": one.outlook.fit,
            "planned": one.outlook.peak_bytes[Place.DEVICE],
            "measured": measured([*words, *one.words.split()]),
        }
        for one in advice[:count]
    ]
    return {
        "memory": memory_bytes,
        "fit": before.fit,
        "measured": measured(words) if count > 1 else before.peak_bytes[Place.DEVICE],
        "advice": runs,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "count"), [(0.85, 1), *(pytest.param(s, 9, marks=pytest.mark.slow) for s in SHARES)]
)
def test_following_advice_makes_a_run_fit_within_the_predicted_memory(ranks, share, count):
    found = ranks(2)(followed, share, count, timeout=500)
    limit = found[0]["memory"]
    assert found[0]["fit"] is Fit.NO
    assert max(one["measured"] for one in found) > limit  # the warning was right
    assert found[0]["advice"]
    for runs in zip(*(one["advice"] for one in found), strict=True):
        most = max(run["measured"] for run in runs)
        print(f"{share:.0%}: {runs[0]['words']}: planned {runs[0]['planned']:,}, measured {most:,}")
        assert runs[0]["fit"] in (Fit.FITS, Fit.TIGHT)
        assert most <= limit
        assert runs[0]["planned"] == pytest.approx(most, rel=TOLERANCE)


def chosen(share):
    """Lets the planner choose for a device with a share of the needed memory; runs the choice."""
    words = MemoryCase("llama", "no_shard", "none").words()
    needed, _ = told(words, PLENTY)
    limit = round(share * needed.peak_bytes[Place.DEVICE])
    config = load_config(None, [w for w in words if "batch_size" not in w] + AUTO).config
    model = model_on_meta(config, given_model_config(config))
    config = view_of(config, model, Topology(dist.get_world_size()), Machine(None, limit)).config
    training = config.training
    return {
        "limit": limit,
        "strategy": config.sharding.strategy.value,
        "batch": (training.per_device_train_batch_size, training.gradient_accumulation_steps),
        "measured": live_peak_bytes(lambda: train(config)),
    }


@pytest.mark.slow
def test_a_choice_fits_and_keeps_the_sequences_per_update(ranks):
    found = ranks(2)(chosen, 0.5, timeout=300)
    micro_batch, accumulation = found[0]["batch"]
    assert micro_batch * accumulation == 4
    assert accumulation > 1
    assert max(one["measured"] for one in found) <= found[0]["limit"]


def test_a_run_is_checked_with_the_chosen_micro_batches(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("a small text that says little, many times over. " * 4000)
    words = [
        *MemoryCase("llama", "full_shard", "none").words(),
        f"data.path={text}",
        f"training.output_dir={tmp_path / 'run'}",
        "training.max_seq_length=128",
        "per_device_train_batch_size=auto",
        "gradient_accumulation_steps=2",
    ]
    for limit, expected in ((PLENTY, (16, 1)), (120 << 20, (8, 2))):
        monkeypatch.setattr(train_outlook, "this_machine", lambda _, m=limit: Machine(None, m))
        checked = start.prepare_run(load_config(None, words), 2, Command.TRAIN, "never")
        training = checked.view.config.training
        assert checked.resolved.config.training is training
        assert training.gradient_accumulation_steps == expected[1]
        assert training.per_device_train_batch_size == expected[0]
        assert checked.steps.order.shape.global_batch == 32
