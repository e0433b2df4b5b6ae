"""The plan includes a teacher: its weights, its forward, and the loss in chunks."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from benchmarks.memory import MemoryCase
from benchmarks.memory_rank import NUM_STEPS, live_peak_bytes
from transformers import AutoModelForCausalLM, LlamaConfig

import fullshard as fs
from fullshard.config.load import load_config
from fullshard.models.build import given_model_config, model_on_meta
from fullshard.outlook.memory import HEADROOM, TEACHER, Fit
from fullshard.outlook.predict import Machine
from fullshard.planner.mesh import Topology
from fullshard.planner.units import Place
from fullshard.recipes.base import Seat
from fullshard.recipes.distill.recipe import build_student, build_teacher
from fullshard.recipes.registry import Command, check_command
from fullshard.run.optim import build_optimizer
from fullshard.run.outlook import look_at, view_of
from support.sizes import sizes_of

TOLERANCE = 0.03

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A teacher that is wider and deeper than its student."""
    found = tmp_path_factory.mktemp("teacher")
    config = LlamaConfig(vocab_size=2000, **sizes_of(192, 512, 4, 2, layers=5))
    AutoModelForCausalLM.from_config(config).save_pretrained(found)
    return found


def config_of(folder, strategy, words):
    given = [*MemoryCase("llama", strategy, "none").words(), f"teacher={folder}", *words]
    return load_config(None, given).config


def learn(config):
    """Runs a few steps like the loop of `fullshard distill`."""
    training, seat = (
        config.training,
        Seat(dist.get_rank(), dist.get_world_size(), torch.device("cpu")),
    )
    teacher = build_teacher(config, seat, Path())
    model, objective = build_student(config, teacher, given_model_config(config), seat)
    optimizer = build_optimizer(model, training)
    for _ in range(NUM_STEPS):
        ids = torch.randint(2000, (training.per_device_train_batch_size, training.max_seq_length))
        loss, num_tokens = objective.loss(model, {"input_ids": ids, "labels": ids.clone()})
        (loss * (1 / num_tokens)).backward()
        del loss
        fs.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return teacher, model, optimizer


def planned_and_measured(folder, strategy, words):
    config = config_of(folder, strategy, words)
    outlook = look_at(config, dist.get_world_size(), Machine(None, None))
    assert outlook.is_traced
    measured = live_peak_bytes(lambda: learn(config))
    return dict(outlook.peak_bytes), sum(outlook.peak_bytes.values()), measured


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("full_shard", []),
        pytest.param(
            "full_shard",
            ["distill.chunk_size=100", "distill.teacher_strategy=no_shard"],
            marks=pytest.mark.long,
        ),
        ("no_shard", ["distill.loss=hidden", "distill.teacher_offload=cpu"]),
    ],
    ids=["as the student", "small chunks, copied", "hidden states, on the host"],
)
def test_a_teachers_memory_is_in_the_plan(ranks, folder, strategy, words):
    found = ranks(2)(planned_and_measured, folder, strategy, words, timeout=240)
    planned, measured = found[0][1], max(one[2] for one in found)
    print(f"{words}: planned {planned:,}, measured {measured:,}, {planned / measured - 1:+.2%}")
    assert planned == pytest.approx(measured, rel=TOLERANCE)
    assert bool(found[0][0][Place.HOST]) == ("distill.teacher_offload=cpu" in words)


def test_the_plan_lists_the_teachers_memory(folder):
    outlook = look_at(config_of(folder, "full_shard", []), 4, Machine(None, None))
    rows = {row.name: row.num_bytes for row in outlook.rows}
    theirs = sum(
        param.numel() for param in AutoModelForCausalLM.from_pretrained(folder).parameters()
    )
    assert rows[f"{TEACHER}parameter shards"] == pytest.approx(4 * theirs / 4, rel=0.01)
    assert not any("gradient" in name for name in rows if name.startswith(TEACHER))


@pytest.mark.long
def test_the_planners_choice_leaves_room_for_the_teacher(folder):
    words = ["train_batch_size=16", "distill.chunk_size=100"]
    whole = [*words, "per_device_train_batch_size=8"]
    most = look_at(config_of(folder, "full_shard", whole), 2, Machine(None, None))
    theirs = sum(row.num_bytes for row in most.rows if row.name.startswith(TEACHER))
    # With this headroom, all samples at once would fit with half of the teacher.
    limit = round((most.peak_bytes[Place.DEVICE] - theirs / 2) / (1 - HEADROOM))
    asked = config_of(folder, "auto", [*words, "per_device_train_batch_size=auto"])
    check_command(asked, Command.DISTILL)
    model = model_on_meta(asked, given_model_config(asked))
    chosen = view_of(asked, model, Topology(2), Machine(None, limit)).config
    assert chosen.training.per_device_train_batch_size == 4
    assert chosen.training.gradient_accumulation_steps == 2
    taken = look_at(chosen, 2, Machine(None, limit))
    assert taken.fit is Fit.FITS
