"""PyTorch's FSDP2 example: a model from meta, its layout, checkpoints through DTensors."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fullshard.compat.fsdp2 import FSDPModule, fully_shard
from support.compat import Net, loss_of
from support.ranks import on_ranks


def make(*, tied=False):
    with torch.device("meta"):
        model = Net(tied=tied)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def inspect(model):
    assert isinstance(model, FSDPModule)
    for param in model.parameters():
        assert param.placements == (Shard(0),)
        assert param.device_mesh.size() == 2
        assert param.dtype == torch.float32


def save(model, optimizer, folder):
    whole = {key: value.full_tensor() for key, value in rows_of(model).items()}
    whole["shift"] = model.shift
    state = optimizer.state_dict()
    states = {
        number: {
            key: value.full_tensor() if isinstance(value, DTensor) else value
            for key, value in values.items()
        }
        for number, values in state["state"].items()
    }
    if dist.get_rank() == 0:
        torch.save(whole, folder / "model.pt")
        torch.save({**state, "state": states}, folder / "optim.pt")
    dist.barrier()


def rows_of(model):
    return {key: value for key, value in model.state_dict().items() if isinstance(value, DTensor)}


def load_model(model, folder):
    whole = torch.load(folder / "model.pt", mmap=True, weights_only=True, map_location="cpu")
    on_meta = model.state_dict()
    placed = {"shift": whole["shift"]}
    for name in [key for key in whole if key != "shift"]:
        shown = on_meta[name]
        assert shown.is_meta
        assert shown.shape == whole[name].shape
        rows = distribute_tensor(whole[name], shown.device_mesh, shown.placements)
        assert shown.to_local().shape == rows.to_local().shape
        placed[name] = nn.Parameter(rows)
    result = model.load_state_dict(placed, strict=False, assign=True)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])


def load_optimizer(optimizer, folder):
    whole = torch.load(folder / "optim.pt", mmap=True, weights_only=True, map_location="cpu")
    _init_optim_state(optimizer)
    state = optimizer.state_dict()
    for number, values in state["state"].items():
        for key, value in values.items():
            saved = whole["state"][number][key]
            if isinstance(value, DTensor):
                saved = distribute_tensor(saved, value.device_mesh, value.placements)
            values[key] = saved
    optimizer.load_state_dict(state)


def train(model, optimizer, first):
    losses = []
    for step in (first, first + 1):
        model.unshard()
        loss = loss_of(model, step, dist.get_rank())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@on_ranks(2)
def test_the_example_of_fsdp2_goes_from_meta_through_dtensors(tmp_path):
    model = make()
    inspect(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.load_state_dict(Net().state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    train(model, optimizer, 0)
    inspect(model)
    save(model, optimizer, tmp_path)
    other = make()
    load_model(other, tmp_path)
    inspect(other)
    assert sum(param.numel() for param in other.parameters()) < 4000  # at most 5325 at once
    twin = torch.optim.Adam(other.parameters(), lr=1e-2)
    load_optimizer(twin, tmp_path)
    assert train(other, twin, 2) == train(model, optimizer, 2)


@on_ranks(2)
def test_a_model_on_meta_is_loaded_in_parts():
    """Missing weights raise an error at the first forward, not before."""
    model = make(tied=True)
    torch.manual_seed(0)
    values = Net(tied=True).state_dict()
    some = {key: value for key, value in values.items() if not key.startswith("layers.1.")}
    model.load_state_dict(some, strict=False, assign=True)
    assert "elements [" in repr(model.layers[0].up.weight)  # sharded before the next unit
    assert model.state_dict()["layers.1.up.weight"].is_meta
    again = {"layers.0.up.weight": values["layers.0.up.weight"] + 1}
    model.load_state_dict(again, strict=False, assign=True)
    values.update(again)
    first = model.state_dict()["layers.0.up.weight"]
    assert torch.equal(first.full_tensor(), values["layers.0.up.weight"])
    with pytest.raises(RuntimeError, match=r"layers\.1\.norm\.weight"):
        model(torch.zeros(1, 2, dtype=torch.long))
    model.load_state_dict(values, assign=True)
    assert model.head.weight is model.embed.weight
    model(torch.zeros(1, 2, dtype=torch.long))
