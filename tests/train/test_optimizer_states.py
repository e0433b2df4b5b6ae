"""The plan has the bytes of every optimizer's states exactly."""

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.memory_rank import live_peak_bytes
from torch import nn
from transformers.optimization import Adafactor

import fullshard as fs
from fullshard.config.load import load_config
from fullshard.config.values import Optimizer
from fullshard.models.build import build_sharded, given_model_config
from fullshard.outlook.predict import Machine
from fullshard.planner.memory import WHOLES
from fullshard.planner.optimizers import states_of
from fullshard.recipes.base import causal_lm_loss
from fullshard.run.optim import Average, build_optimizer
from fullshard.run.outlook import look_at
from support.grid import chequered
from support.models import ODD_LLAMA
from support.scripts import bytes_with_gradients, whole_parameters


def memory_of(states):
    """Returns bytes of tensors; shared storage counts once."""
    tensors = [getattr(s, "to_local", lambda s=s: s)() for s in states if hasattr(s, "nbytes")]
    by_place = {tensor.data_ptr(): tensor for tensor in tensors if tensor.numel()}
    return sum(tensor.nbytes for tensor in by_place.values())


def kept(words):
    """Returns bytes of states after a step, planned ones, bytes of full tensors, planned ones.

    Only the first rank plans: for the rank with the largest states.
    """
    config = load_config(None, [f"model.config={json.dumps(ODD_LLAMA)}", *words]).config
    model = build_sharded(config, given_model_config(config), torch.device("cpu"))
    optimizer = build_optimizer(model, config.training)
    seen = [0]
    ids = torch.randint(100, (2, 16))
    for watch in (lambda _: None, lambda params: seen.append(bytes_with_gradients(params))):
        optimizer.zero_grad()
        causal_lm_loss(model(input_ids=ids, use_cache=False).logits, ids)[0].backward()
        with whole_parameters(watch):  # the first step also allocates for the probe
            optimizer.step()
    if config.training.ema_decay is not None:
        Average(optimizer, config.training.ema_decay).update()
    states = [value for state in optimizer.state.values() for value in state.values()]
    held = memory_of(states)
    is_owned = getattr(optimizer, "kind", "").startswith("owned")
    if not is_owned or config.sharding.strategy == "no_shard":  # it updates the model's parameters
        seen = [0]
    if dist.get_rank() > 0:
        return held, 0, max(seen), 0
    memory = look_at(config, dist.get_world_size(), Machine(None, None)).plan.memory
    planned = [r.num_bytes for r in memory if r.name.startswith(("optimizer", "average"))]
    wholes = [r.num_bytes for r in memory if r.name == WHOLES]
    return held, sum(planned), max(seen), sum(wholes)


RUNS = {
    "full_shard": (2, ["strategy=full_shard"]),
    "bf16 masters, a frozen block": (
        3,
        ["strategy=full_shard", "sharding.master_dtype=bf16", "freeze=[model.layers.0.*]"],
    ),
    "no_shard, an average": (2, ["strategy=no_shard", "training.ema_decay=0.9"]),
    "hybrid_shard": (4, ["strategy=hybrid_shard", "sharding.replicate=2"]),
}


@pytest.mark.short(2)
@pytest.mark.parametrize(("optim", "run"), chequered(map(str, Optimizer), RUNS))
def test_states_are_planned_to_the_byte(ranks, optim, run):
    world_size, words = RUNS[run]
    if optim == Optimizer.ADAMW_BNB_8BIT:
        pytest.importorskip("bitsandbytes")
    found = ranks(world_size)(kept, [*words, f"optim={optim}"])
    assert max(held for held, *_ in found) == found[0][1], found
    wholes = max(seen for *_, seen, _ in found)
    settings = load_config(None, [f"optim={optim}"]).config.training
    assert int(wholes * (1 + states_of(settings).num_temporaries / 2)) == found[0][3], found


@pytest.mark.parametrize("optim", ["muon", "adafactor"])
def test_an_owners_update_allocates_no_more_than_planned(optim):
    """Measured by torch's allocator on squares, which need the most memory."""
    settings = load_config(None, [f"optim={optim}"]).config.training
    weight = nn.Parameter(torch.randn(768, 768))
    weight.grad = torch.randn(768, 768)
    if optim == "muon":
        optimizer: Any = torch.optim.Muon([weight], lr=1e-3, ns_steps=1)  # each allocates the same
    else:
        optimizer = Adafactor([weight], lr=1e-3, relative_step=False, scale_parameter=False)
    optimizer.step()
    made = live_peak_bytes(optimizer.step) / weight.nbytes
    planned = states_of(settings).num_temporaries
    # oneDNN's products need one more MiB on processors with AMX; a GPU's do not.
    scratch = 2**20 / weight.nbytes
    assert planned - 0.2 < made <= planned + scratch


def test_a_custom_optimizer_is_planned_by_bytes_per_element():
    plan = fs.plan(ODD_LLAMA, world_size=3, optimizer_bytes=2.5)
    largest = max(sum(s.numel for s in plan.view(rank).all_slices()) for rank in range(3))
    assert plan.memory[2].name == "optimizer (2.5 bytes)"
    assert plan.memory[2].num_bytes == pytest.approx(2.5 * largest, abs=1)
