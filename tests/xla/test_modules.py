"""Models of NNX and of Equinox train under a plan as under their own libraries on one device."""

from typing import Any

import numpy as np
import pytest

from fullshard.errors import ConfigError
from support.lazy import eqx, fj, jax, jnp, nnx, optax

NUM_STEPS, NUM_SAMPLES, WIDTH, NUM_CLASSES = 3, 16, 64, 10


def flax_model():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3)])
            self.head = nnx.Linear(WIDTH, NUM_CLASSES, rngs=rngs)

        def __call__(self, x):
            for layer in self.layers:
                x = x + jax.nn.gelu(layer(x))
            return self.head(x)

    return Model(nnx.Rngs(0))


def equinox_model():
    class Model(eqx.Module):
        layers: list
        head: eqx.nn.Linear
        act: Any

        def __call__(self, x):
            for layer in self.layers:
                x = x + self.act(layer(x))
            return self.head(x)

    keys = jax.random.split(jax.random.key(0), 4)
    layers = [eqx.nn.Linear(WIDTH, WIDTH, key=key) for key in keys[:3]]
    return Model(layers, eqx.nn.Linear(WIDTH, NUM_CLASSES, key=keys[3]), jax.nn.gelu)


def batches():
    draw = np.random.default_rng(0)
    shape = (NUM_SAMPLES, WIDTH)
    return [
        (draw.normal(size=shape).astype(np.float32), draw.integers(0, NUM_CLASSES, NUM_SAMPLES))
        for _ in range(NUM_STEPS)
    ]


def losses_under_a_plan(model, call):
    params, rebuild = fj.split(model)
    mesh = fj.make_mesh(1, 4, devices=jax.devices()[:4])
    plan = fj.plan(params, {"strategy": "full_shard"}, mesh)

    def loss(params, batch):
        logits = call(rebuild(params), batch["x"])
        found = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return found.sum(), jnp.asarray(found.size)

    tx = optax.adam(1e-2)
    state, step, losses = fj.shard(plan, params, tx), fj.train_step(plan, loss, tx), []
    for x, y in batches():
        state, metrics = step(state, {"x": x, "y": y})
        losses.append(float(metrics["loss"]))
    whole = rebuild(fj.full_params(state))
    return losses, float(abs(call(whole, batches()[0][0])).sum())


def of_flax():
    found = losses_under_a_plan(flax_model(), lambda model, x: model(x))
    model, wanted = flax_model(), []
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    def loss(model, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    for x, y in batches():
        value, grads = nnx.value_and_grad(loss)(model, x, y)
        optimizer.update(model, grads)
        wanted.append(float(value))
    return found, (wanted, float(abs(model(batches()[0][0])).sum()))


def of_equinox():
    def call(model, x):
        return jax.vmap(model)(x)

    found = losses_under_a_plan(equinox_model(), call)
    model, tx, wanted = equinox_model(), optax.adam(1e-2), []
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    def loss(model, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(call(model, x), y).mean()

    for x, y in batches():
        value, grads = eqx.filter_value_and_grad(loss)(model, x, y)
        updates, opt_state = tx.update(grads, opt_state)
        model = eqx.apply_updates(model, updates)
        wanted.append(float(value))
    return found, (wanted, float(abs(call(model, batches()[0][0])).sum()))


@pytest.mark.long
@pytest.mark.parametrize("library", [of_flax, of_equinox])
def test_a_module_trains_as_under_its_own_library(devices, library):
    (found, output), (wanted, wanted_output) = devices(library)
    assert found == pytest.approx(wanted, rel=1e-5)
    assert output == pytest.approx(wanted_output, rel=1e-5)


def parts_of_numpy():
    params, rebuild = fj.split({"w": np.ones(3), "b": jnp.ones(2), "n": np.arange(4)})
    return sorted(jax.tree.leaves(jax.tree.map(np.size, params))), rebuild(params)["n"].size


def test_arrays_of_numpy_are_parameters_too(devices):
    assert devices(parts_of_numpy) == ([2, 3], 4)


def said_of(library):
    if library == "flax":
        model = nnx.Sequential(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    else:
        model = [eqx.nn.BatchNorm(4, "batch", mode="batch")]
        fj.split(eqx.nn.make_with_state(lambda: model)()[0])  # its state is apart
    try:
        fj.split(model)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("library", "name"), [("flax", "layers.0.rngs.count"), ("equinox", "0.batch_counter")]
)
def test_state_that_no_step_would_change_is_refused_by_name(devices, library, name):
    said = devices(said_of, library)
    assert said.startswith(f"{name}: expected a model whose state is its parameters")
