"""Both engines train one decoder from equal weights and data to equal weights."""

import os
from functools import cache

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import fullshard as fs
from fullshard.config.schema import TrainingConfig
from fullshard.run.optim import build_optimizer
from support import decoders
from support.lazy import fj, fx, jax, jnp, optax, user_models
from support.processes import python

NUM_STEPS = 20
NUMBERS = {"betas": (0.9, 0.95), "epsilon": 1e-6, "decay": 0.1, "rate": 1e-2, "norm": 0.5}


def in_torch(name, folder):
    """Losses and final weights of torch's engine in float64; writes the initial weights."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = decoders.build(decoders.config_of(name))
    if rank == 0:
        model.save_pretrained(folder)
    fs.shard(model)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=NUMBERS["rate"],
        betas=NUMBERS["betas"],
        eps=NUMBERS["epsilon"],
        weight_decay=NUMBERS["decay"],
    )
    losses = []
    for ids, labels in decoders.batches(NUM_STEPS):
        count = int((labels[:, 1:] != -100).sum())
        logits = model(input_ids=ids[rank::world_size], use_cache=False).logits[:, :-1]
        mine = labels[rank::world_size, 1:]
        total = F.cross_entropy(logits.flatten(0, 1), mine.flatten(), reduction="sum")
        (total * world_size / count).backward()
        fs.clip_grad_norm_(model, NUMBERS["norm"])
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total.detach_())
        losses.append(float(total) / count)
    weights = fs.full_state_dict(model, rank0_only=False)
    return losses, {name: value.numpy() for name, value in weights.items()}


def in_jax(name, folder, strategy, replicate, shard, tensor=1, expert=1):
    config = fx.decoder.DecoderConfig.of(decoders.config_of(name))
    devices = jax.devices()[: replicate * shard * expert * tensor]
    mesh = fj.make_mesh(
        replicate, shard, expert=expert, tensor=tensor, strategy=strategy, devices=devices
    )
    settings = {"strategy": strategy, "master_dtype": "float64"}
    plan = fx.decoder.planned(config.shapes(), settings, mesh)
    decay = plan.map(lambda _: NUMBERS["decay"])
    tx = fx.opt_state.adamw(NUMBERS["betas"], NUMBERS["epsilon"], decay)
    state = fj.load(plan, folder, tx)
    step = fj.train_step(plan, fx.decoder.loss_fn(config, plan), tx, max_grad_norm=NUMBERS["norm"])
    losses = []
    for ids, labels in decoders.batches(NUM_STEPS):
        batch = {"input_ids": ids.numpy(), "labels": labels.numpy()}
        state, metrics = step(state, batch, learning_rate=NUMBERS["rate"])
        losses.append(float(metrics["loss"]))
        assert metrics["grad_norm"] > NUMBERS["norm"]  # it is clipped too
    weights = {}
    for array, leaf in zip(plan.table.arrays, jax.tree.leaves(fj.full_params(state)), strict=True):
        layers = leaf if array.block else [leaf]
        weights |= dict(zip(array.names(), layers, strict=True))
    found, planned = user_models.moved(plan, step, state, batch, learning_rate=NUMBERS["rate"])
    return losses, weights, found == planned


@pytest.fixture(scope="module")
def torchs(ranks, tmp_path_factory):
    @cache
    def trained(name):
        folder = tmp_path_factory.mktemp("weights")
        return folder, *ranks(2)(in_torch, name, folder)[0]

    return trained


@pytest.mark.parametrize(
    ("name", "mesh"),  # strategy, replicate, shard, tensor, expert
    [
        ("qwen3_moe", ("full_shard", 1, 2, 1, 2)),
        pytest.param("qwen3", ("full_shard", 1, 3, 2), marks=pytest.mark.long),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("qwen3", ("no_shard", 3, 1, 2)),
                ("qwen3", ("hybrid_shard", 2, 2, 2)),
                ("mixtral", ("full_shard", 1, 2, 2)),
                ("mixtral", ("full_shard", 1, 1, 1, 4)),
                ("mixtral", ("no_shard", 2, 1, 1, 2)),
                ("qwen3_moe", ("shard_grad_op", 1, 2, 2, 2)),
                ("qwen3_moe", ("hybrid_shard", 2, 1, 1, 2)),
            )
        ),
    ],
    ids=str,
)
def test_twenty_steps_in_float64_equal_those_of_torch(torchs, devices, name, mesh):
    folder, wanted_losses, wanted = torchs(name)
    losses, weights, as_planned = devices(in_jax, name, folder, *mesh)
    assert losses == pytest.approx(wanted_losses, rel=1e-10)
    assert weights.keys() == wanted.keys()
    for name, value in weights.items():
        assert abs(value - wanted[name]).max() <= 1e-10 * abs(wanted[name]).max(), name
    assert as_planned


def updated(optim):
    """Weights after three updates by a run's optimizer, on torch and on two devices."""
    training = TrainingConfig.of({"optim": optim, "weight_decay": 0.5, "learning_rate": 0.1})
    start = {name: torch.linspace(-1, 2, 8, dtype=torch.float64) for name in ("weight", "a_norm")}
    model = torch.nn.ParameterDict(start)
    optimizer = build_optimizer(model, training)
    decays = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    plan = fj.plan(
        {name: value.numpy() for name, value in start.items()},
        {"master_dtype": "float64"},
        fj.make_mesh(1, 2, devices=jax.devices()[:2]),
    )
    tx = fx.opt_state.of_run(training, {name: decays[p] for name, p in model.items()})
    state = fj.shard(plan, {name: value.numpy() for name, value in start.items()}, tx)
    step = fj.train_step(
        plan, lambda params, _: (jnp.sin(params["weight"] * params["a_norm"]).sum(), 1.0), tx
    )
    for _ in range(3):
        state, _ = step(state, np.ones(2), learning_rate=training.learning_rate)
        torch.sin(model["weight"] * model["a_norm"]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: (p.detach().numpy(), fj.full_params(state)[name]) for name, p in model.items()}


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
def test_the_optimizer_of_a_run_updates_like_that_of_torch(devices, optim):
    for wanted, found in devices(updated, optim).values():
        assert abs(found - wanted).max() <= 1e-12


def carried():
    """Weights of a model in bfloat16, before and after they were moved to the devices."""
    from fullshard.run.on_xla import state_of, torch_weights

    config = decoders.config_of("qwen2")
    shapes = fx.decoder.DecoderConfig.of(config).shapes()
    mesh = fj.make_mesh(1, 2, devices=jax.devices()[:2])
    plan = fx.decoder.planned(shapes, {"master_dtype": "bfloat16"}, mesh)
    weights = decoders.build(config).bfloat16().state_dict()
    return weights, torch_weights(state_of(plan, weights, optax.identity()))


@pytest.mark.short(1)
def test_weights_in_bfloat16_reach_the_devices_and_the_exported_model(devices):
    weights, found = devices(carried)
    for name, value in found.items():
        assert torch.equal(value, weights[name]), name
        assert value.dtype is torch.bfloat16


@pytest.mark.short(1)
@pytest.mark.parametrize(("name", "value"), [("JAX_PLATFORMS", "nope"), ("JAX_DISABLE_JIT", "1")])
def test_a_setting_with_which_jax_cannot_train_is_named(name, value):
    words = "from fullshard.xla.processes import join; join(0, 1, str)"
    done = python("-c", words, env=os.environ | {name: value}, code=1)
    assert f"ConfigError: {name}: expected" in done.stderr


@pytest.mark.short(1)
def test_plan_names_a_platform_that_jax_cannot_use():
    model = "model.config={model_type: llama, hidden_size: 8, num_attention_heads: 2}"
    words = "-m", "fullshard", "plan", "backend=jax", model, "launch.num_processes=1"
    done = python(*words, env=os.environ | {"JAX_PLATFORMS": "nope"}, code=2)
    assert done.stderr.startswith("ConfigError: JAX_PLATFORMS: expected")


def test_an_unnamed_platform_is_not_blamed_on_a_variable():
    words = "import jax; from fullshard.xla.processes import join; "
    words += "jax.config.update('jax_platforms', None); "
    words += "jax.device_count = lambda: 1 / 0; join(0, 1, str)"
    env = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = python("-c", words, env=env, code=1)
    assert "ConfigError: backend: expected a platform" in done.stderr


def test_checks_of_a_users_own_functions_are_off_in_a_run():
    words = "import jax.numpy as np; from fullshard.xla.processes import join; join(0, 1, str); "
    words += "np.ones(2, np.int32) + np.ones((2, 2), np.float32)"
    checks = {"JAX_NUMPY_DTYPE_PROMOTION": "strict", "JAX_NUMPY_RANK_PROMOTION": "raise"}
    python("-c", words, env=os.environ | checks)
