"""Training on several processes of jax, each with its own samples and one device."""

from functools import partial

import numpy as np
import pytest
import torch.distributed as dist

from fullshard.errors import ConfigError
from fullshard.launch import rendezvous
from support.lazy import fj, fx, jax, nnx, optax, user_models
from support.ranks import RankPool

NUM_STEPS = 2


@pytest.fixture(scope="module")
def two(pytestconfig):
    """`two(function, *args)` runs a module-level function in two processes of jax."""
    filters = [*pytestconfig.getini("filterwarnings"), *(pytestconfig.option.pythonwarnings or [])]
    pool = RankPool(2, filters or ["error"])
    yield lambda function, *args: pool(function, *args, timeout=300.0)
    pool.close()


def joined():
    """Returns this process's rank after it has connected to the other."""
    rank = dist.get_rank()
    if not jax.distributed.is_initialized():
        address = [rendezvous.free_address(None) if rank == 0 else ""]
        dist.broadcast_object_list(address)
        fx.processes.join(rank, 2, lambda: address[0], wide=True)
    return rank


def mine(rank, batch):
    return {name: value[rank::2] for name, value in batch.items()}


def trained(name, strategy, replicate, shard):
    """Differences from one device, and collectives as compiled and as planned."""
    rank = joined()
    model, tx = user_models.MODELS[name](), optax.adamw(1e-2, eps=1e-3)
    mesh = fj.make_mesh(replicate, shard)
    plan, step = user_models.planned_step(model, tx, {"strategy": strategy}, mesh)
    state = fj.shard(plan, model.params, tx, model.variables)
    start = fj.full_params(state)
    losses = []
    for at in range(NUM_STEPS):
        state, metrics = step(state, mine(rank, user_models.images(at)))
        losses.append(float(metrics["loss"]))
    census, planned = user_models.moved(plan, step, state, mine(rank, user_models.images(0)))
    parts = partial(user_models.trainable, plan)
    wanted = user_models.alone(model, start, tx, NUM_STEPS, 1, parts)
    found = jax.tree.leaves(fj.full_params(state))
    apart = max(np.abs(a - b).max() for a, b in zip(found, wanted[1], strict=True))
    return np.abs(np.subtract(losses, wanted[0])).max(), apart, census, planned


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("lora", ("full_shard", 1, 2)),
        pytest.param("linen_cnn", ("full_shard", 1, 2), marks=pytest.mark.long),
        pytest.param("equinox_mlp", ("no_shard", 2, 1), marks=pytest.mark.long),
        pytest.param("rnn", ("shard_grad_op", 1, 2), marks=pytest.mark.long),
        pytest.param("experts", ("full_shard", 1, 2), marks=pytest.mark.long),
        pytest.param("equinox_batchnorm", ("full_shard", 1, 2), marks=pytest.mark.long),
    ],
)
def test_two_processes_train_as_one_device_with_the_planned_collectives(two, name, mesh):
    for losses, parameters, census, planned in two(trained, name, *mesh):
        assert losses < 1e-11
        assert parameters < 1e-11
        assert census == planned
        assert "all-to-all" in census
        assert "all-gather" not in census


def tutorial():
    """Losses of the tutorial's step; each process has half of the samples."""
    rank = joined()

    def losses(mesh, samples):
        graph, params = nnx.split(user_models.nnx_classifier(nnx.Rngs(0)))
        params = fj.shard_fsdp(params, threshold=100, mesh=mesh)
        state = nnx.ModelAndOptimizer(nnx.merge(graph, params), optax.adam(1e-2))
        step, found = fj.create_fsdp_train_step(mesh), []
        for at in range(3):
            ids = np.random.default_rng(at).integers(0, 50, (16, 6))
            state, loss, _ = step(state, samples({"input_ids": ids, "label": ids[:, 0] % 8}))
            found.append(float(loss))
        return found

    together = losses(
        jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",)), lambda batch: mine(rank, batch)
    )
    alone = []
    if rank == 0:
        model_alone = user_models.nnx_classifier(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model_alone, optax.adam(1e-2), wrt=nnx.Param)

        def loss_of(model, ids):
            return optax.softmax_cross_entropy_with_integer_labels(model(ids), ids[:, 0] % 8).mean()

        for at in range(3):
            ids = np.random.default_rng(at).integers(0, 50, (16, 6))
            value, grads = nnx.value_and_grad(loss_of)(model_alone, ids)
            optimizer.update(model_alone, grads)
            alone.append(float(value))
    return together, alone


@pytest.mark.long
def test_the_tutorials_step_uses_each_processs_own_samples(two):
    (first, alone), (second, _) = two(tutorial)
    assert first == second == pytest.approx(alone, rel=1e-5)


def made_from_own_seeds():
    """What is said of a key, of parameters and of variables that differ between processes."""
    rank = joined()

    def init_fn(key):
        return {"w": jax.random.normal(key, (4, 2)), "scale": jax.random.normal(key)}

    plan = fj.plan(jax.eval_shape(init_fn, jax.random.key(0)), None, fj.make_mesh(1, 2))
    fj.init(plan, init_fn, None, jax.random.key(0), {"key": jax.random.key(1)})  # equal ones
    mine, said = jax.random.key(rank), []
    for make in (
        lambda: fj.init(plan, init_fn, None, mine),
        lambda: fj.shard(plan, init_fn(mine)),
        lambda: fj.init(plan, init_fn, variables={"key": mine}),
    ):
        with pytest.raises(ConfigError, match="expected the same values on all processes") as found:
            make()
        said.append(str(found.value).partition(":")[0])
    return said


@pytest.mark.long
def test_states_made_from_a_seed_of_each_process_are_refused(two):
    assert two(made_from_own_seeds) == [["key", "params", "variables"]] * 2
