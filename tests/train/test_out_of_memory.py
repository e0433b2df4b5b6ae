"""Running out of memory is answered with the plan and with remedies."""

import re
from types import SimpleNamespace

import pytest
import torch

from fullshard.config.schema import RunConfig
from fullshard.engine.hugging_face import build_on_meta
from fullshard.errors import OutOfMemoryError
from fullshard.planner.mesh import Topology
from fullshard.recipes.base import RecipeKind, Seat
from fullshard.recipes.registry import Command
from fullshard.run import on_torch, session
from fullshard.run.outlook import explained_memory, view_of
from support.model_folder import small_config

SHAPE = small_config()


def view():
    config = RunConfig(model="x", training={"per_device_train_batch_size": 1})
    return view_of(config, build_on_meta(SHAPE), Topology(2))


def test_an_allocation_that_fails_is_answered_with_the_plans_table_and_the_guilty_row():
    with pytest.raises(OutOfMemoryError) as caught, explained_memory(view):
        torch.empty(1 << 60, dtype=torch.uint8)
    said = str(caught.value)
    assert caught.value.exit_code == 4
    assert "memory: expected to need " in said
    assert "optimizer (AdamW)" in said
    assert said.count("<- the largest") == 1
    # It should have fitted, so each advice needs less and states how much.
    *_, told = said.partition("what would help:\n")
    assert told.splitlines()
    assert all(
        re.match(r"  \S+=\S+( \S+=\S+)*: fits: .* per device", line) for line in told.splitlines()
    )


def test_a_run_that_cannot_even_be_built_is_answered_too(monkeypatch):
    config = RunConfig(model="x")
    found = SimpleNamespace(
        config=config,
        folder=SimpleNamespace(path=None),
        model_config=SHAPE,
        seat=Seat(1, 2, torch.device("cpu")),
        command=Command.TRAIN,
        batches=lambda: None,
        steps=None,
    )

    def build(*_):
        raise MemoryError

    kind = RecipeKind(build=build)
    monkeypatch.setattr(session.Session, "read", lambda *_: found)
    monkeypatch.setattr(Command, "kind", kind)
    monkeypatch.setattr(on_torch, "view_of", lambda *_: view())
    monkeypatch.setattr(on_torch, "model_on_meta", lambda *_: None)
    with pytest.raises(OutOfMemoryError, match="what would help:"):
        session.train(config, found.folder, found.seat)


def test_other_errors_pass_unchanged_without_a_plan():
    def never():
        raise AssertionError("asked")

    with pytest.raises(RuntimeError, match="shape"), explained_memory(never):
        raise RuntimeError("shape mismatch")
    with explained_memory(never):
        pass
