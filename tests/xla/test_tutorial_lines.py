"""More lines of FSDP tutorials for JAX, as written there."""

import logging
import warnings

import numpy as np
import pytest

from support.lazy import fj, flax, jax, jnp, optax, train_state
from support.processes import python
from support.tanh_layers import compiled

NUM_STEPS, CLASSES, VOCABULARY = 3, 8, 50


def batch_of(step, ids_key="input_ids"):
    ids = np.random.default_rng(step).integers(0, VOCABULARY, (16, 6))
    return {ids_key: ids, "labels": ids[:, 0] % CLASSES}


def whole_and_cut():
    """Shardings of arrays for each way to give the mesh; the warning about an indivisible array."""
    params = {"kernel": np.ones((64, 32)), "bias": np.ones(32), "odd": np.ones((51, 51))}
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",))
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("fullshard").addHandler(handler)
    try:
        placed = [fj.shard_fsdp(params, threshold=1024, mesh=mesh)]
    finally:
        logging.getLogger("fullshard").removeHandler(handler)
    with jax.set_mesh(jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))):
        placed.append(fj.shard_fsdp(params))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with mesh:
            placed.append(fj.shard_fsdp(params))
    tables = [[(name, tuple(spec)) for name, _, spec in fj.sharding_table(tree)] for tree in placed]
    return tables, said


def test_the_mesh_is_an_argument_or_a_context_and_unsharded_arrays_are_named(devices):
    tables, said = devices(whole_and_cut)
    assert tables == [[("bias", ()), ("kernel", ("fsdp",)), ("odd", ())]] * 3
    assert said == ["whole on every device, since nothing divides: odd"]


def with_optax_state(loss_given):
    """Losses of a TrainState on eight devices and on one; final shardings of its arrays."""

    class Classifier(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, ids):
            return flax.linen.Dense(CLASSES)(flax.linen.Embed(VOCABULARY, 16)(ids).mean(axis=1))

    model = Classifier()
    first = model.init(jax.random.key(0), batch_of(0)["input_ids"])["params"]

    def loss_fn(params, batch):
        logits = model.apply({"params": params}, batch["tokens"])
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][:, None], -1)
        return -chosen.mean()

    def train(num_devices):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:num_devices]), ("fsdp",))
        params = fj.shard_fsdp(first, threshold=100, mesh=mesh)
        state = train_state.TrainState.create(
            apply_fn=model.apply, params=params, tx=optax.adam(1e-2)
        )
        step = fj.create_fsdp_train_step(mesh, loss_fn if loss_given else None)
        losses = []
        for at in range(NUM_STEPS):
            batch = batch_of(at, "tokens" if loss_given else "input_ids")
            state, loss, metrics = step(state, batch)
            losses.append(float(loss))
        table = [(shape, tuple(spec)) for _, shape, spec in fj.sharding_table(state)]
        return losses, sorted(metrics), table, int(state.step)

    return train(8), train(1)


@pytest.mark.short(1)
@pytest.mark.parametrize("loss_given", [False, True])
def test_a_plain_optax_state_trains_as_on_one_device_and_stays_sharded(devices, loss_given):
    (losses, metrics, table, step), (wanted, *_) = devices(with_optax_state, loss_given)
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert step == NUM_STEPS
    assert metrics == ([] if loss_given else ["accuracy"])
    embedding = [spec for shape, spec in table if shape == (VOCABULARY, 16)]
    assert embedding == [(None, "fsdp")] * 3  # the parameter and both of its moments


def traced_names(folder):
    """Names of collectives in a profile of one step."""
    step, state, batch, plan = compiled({"strategy": "full_shard"})
    state, _ = step(state, batch)
    with jax.profiler.trace(str(folder)):
        step(state, batch)
    (file,) = folder.rglob("*.xplane.pb")
    data = file.read_bytes()
    return {kind for kind in plan.table.collectives() if kind.encode() in data}


def test_a_profile_names_gathers_and_reductions(devices, tmp_path):
    assert devices(traced_names, tmp_path) == {"all-gather", "reduce-scatter", "all-reduce"}


def memory_of_a_device():
    step, state, batch, plan = compiled({"strategy": "full_shard"}, shard=8)
    return fj.memory(step, state, batch), plan.table.num_parameters * 4 // 8


def test_the_memory_of_a_device_is_its_share(devices):
    found, part = devices(memory_of_a_device)
    assert part <= found["arguments"] < 2 * part  # plain SGD has no states
    assert found["peak"] >= found["arguments"] + found["temporary"]


HYBRID = """
import jax, numpy as np, optax
jax.config.update("jax_num_cpu_devices", 32)
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import Mesh
from fullshard.jax import create_fsdp_train_step, print_sharding, shard_fsdp

mesh = Mesh(mesh_utils.create_device_mesh((8, 4)), ("fsdp", "tensor"))
graph, params = nnx.split(nnx.Linear(64, 256, use_bias=False, rngs=nnx.Rngs(0)))
params = shard_fsdp(params, threshold=1024, mesh=mesh)
print_sharding(params)
state = nnx.ModelAndOptimizer(nnx.merge(graph, params), optax.adam(1e-3))
step = create_fsdp_train_step(mesh, loss_fn=lambda model, batch: (model(batch["x"]) ** 2).mean())
state, loss, metrics = step(state, {"x": np.ones((32, 64), np.float32)})
print(state.model.kernel[...].addressable_shards[0].data.shape)
"""


@pytest.mark.slow
def test_fsdp_times_tensor_on_eight_by_four_devices():
    done = python("-c", HYBRID)
    assert f"{'kernel/value':50s} {'(64, 256)':20s} P('tensor', 'fsdp')" in done.stdout
    assert done.stdout.rstrip().endswith("(16, 32)")
