"""Saves and resumes of many ranks: no cost grows with the square of the number of ranks."""

import json
from typing import Any

import pytest
import torch.distributed as dist

import fullshard as fs
from checkpoint.test_save_failures import model_and_optimizer
from fullshard.checkpoint import commit
from fullshard.checkpoint.files import Written
from fullshard.checkpoint.format import FileFacts, Index, StoredSlice, StoredTensor
from fullshard.checkpoint.read import choose
from fullshard.checkpoint.retain import look_at
from fullshard.engine import engine
from fullshard.engine.engine import engine_of
from fullshard.saving import ranks_of

NUM_RANKS = 70  # more than commit.READERS, the number of parallel readers


def part_of(rank):
    """Returns element `rank` of a tensor."""
    file = f"model-{rank:05d}.safetensors"
    piece = StoredSlice(file, rank, rank + 1, f"{rank:032x}")
    tensors = {"model/weight": StoredTensor("F32", (NUM_RANKS,), (piece,))}
    return Written(file, FileFacts(8, f"{rank:032x}"), tensors)


def test_parts_of_many_ranks_are_joined_in_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr(commit, "FAREWELL_S", 0.0)
    place = commit.claim(tmp_path / "step-00000001")
    for rank in range(NUM_RANKS):
        commit.join(place, rank)
    for rank in reversed(range(NUM_RANKS)):
        part = part_of(rank)
        (place.aside / part.name).write_bytes(bytes(8))
        commit.report(place, rank, [part])
    state = {"step": 1, "world_size": NUM_RANKS, "extra": {}, "state": {}}
    documents = commit.Documents(1, {"state.json": json.dumps(state)}, {})
    commit.conclude(place, NUM_RANKS, documents)
    found = choose(commit.ALONE, tmp_path, whole=False)
    index = Index.from_json((found.files / "index.json").read_text(), "index.json")
    slices = index.tensors["model/weight"].slices
    assert [piece.start for piece in slices] == list(range(NUM_RANKS))
    assert [piece.file for piece in slices] == [part_of(rank).name for rank in range(NUM_RANKS)]
    assert look_at(found.path).num_bytes > 8 * NUM_RANKS


def test_is_opaque_is_called_once_per_tensor_for_any_number_of_slices(monkeypatch):
    """`is_opaque` reads every slice, so one call per slice would be quadratic."""
    asked = []
    is_opaque: Any = StoredTensor.opaque.fget
    opaque = property(lambda tensor: asked.append(1) or is_opaque(tensor))
    monkeypatch.setattr(StoredTensor, "opaque", opaque)
    pieces = [piece for rank in range(NUM_RANKS) for piece in part_of(rank).tensors.values()]
    slices = tuple(piece.slices[0] for piece in pieces)
    Index(NUM_RANKS, {"model/weight": StoredTensor("F32", (NUM_RANKS,), slices)}).to_json()
    assert len(asked) == 1


def decides(folder):
    model, optimizer = model_and_optimizer()
    for step in (1, 2):
        fs.save(folder, model, optimizer, step=step)
    dist.barrier()

    def refuse(_value, _group):
        raise AssertionError("a value of every rank was gathered on every rank")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "all_values", refuse)
        return choose(ranks_of(engine_of(model)), folder).step


def test_a_resume_decision_gathers_nothing_of_every_rank(ranks, tmp_path):
    assert ranks(2)(decides, tmp_path) == [2, 2]
