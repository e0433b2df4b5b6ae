"""Models of NNX and of Equinox are split into parameters and the rest, and merged again."""

from typing import Any

import numpy as np
import pytest

from fullshard.errors import ConfigError
from support.lazy import eqx, fj, jax, jnp, nnx, optax, user_models

NUM_SAMPLES, WIDTH, NUM_CLASSES = 16, 64, 10


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


def taken_apart(library):
    """Differences between a model and its parts: losses, gradients, a sharded step."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(NUM_SAMPLES, WIDTH)).astype(np.float32)
    batch = {"x": x, "y": draw.integers(0, NUM_CLASSES, NUM_SAMPLES)}
    model = flax_model() if library == "flax" else equinox_model()
    value_and_grad = nnx.value_and_grad if library == "flax" else eqx.filter_value_and_grad

    def losses(model, batch):
        logits = model(batch["x"]) if library == "flax" else jax.vmap(model)(batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])

    def total(params, batch):
        found = losses(rebuild(params), batch)
        return found.sum(), jnp.asarray(found.size)

    def mean(model):
        return losses(model, batch).mean()

    params, rebuild = fj.split(model)
    found = jax.value_and_grad(lambda params: mean(rebuild(params)))(params)
    wanted = value_and_grad(mean)(model)
    tx = optax.sgd(0.1)
    plan = fj.plan(params, None, fj.make_mesh(1, 4, devices=jax.devices()[:4]))
    state, _ = fj.train_step(plan, total, tx)(fj.shard(plan, params, tx), batch)
    stepped = mean(rebuild(fj.full_params(state)))
    if library == "flax":
        nnx.Optimizer(model, tx, wrt=nnx.Param).update(model, wanted[1])
    else:
        model = eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, wanted[1]))
    return user_models.apart((found, wanted)), abs(float(stepped - mean(model)))


@pytest.mark.parametrize("library", ["flax", "equinox"])
def test_a_module_trains_under_a_plan_as_in_its_own_library(devices, library):
    assert max(devices(taken_apart, library)) < 1e-5


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
        fj.split(eqx.nn.make_with_state(lambda: model)()[0])  # its state is separate
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
