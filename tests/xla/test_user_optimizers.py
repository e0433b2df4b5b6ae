"""Any optax transformation trains as on one device, also saved and resumed elsewhere."""

import inspect
import warnings
from functools import cache

import numpy as np
import pytest

from fullshard.errors import ConfigError
from support.lazy import fj, jax, jnp, optax

NUM_STEPS, SAVED_AFTER = 7, 3


def halves(params):
    """One label per parameter: half of them `a`, half of them `b`."""
    leaves, structure = jax.tree.flatten(params)
    return jax.tree.unflatten(structure, ["ab"[at % 2] for at in range(len(leaves))])


def in_a(params):
    return jax.tree.map(lambda label: label == "a", halves(params))


def optimizer(name):
    def partly(params):
        return halves(params)

    adam = optax.adam(1e-2)
    table = {
        "multi_steps": lambda: optax.MultiSteps(adam, 4),
        "two traces": lambda: optax.chain(optax.trace(0.9), optax.trace(0.5), optax.scale(-1e-3)),
        "masked": lambda: optax.chain(optax.masked(optax.trace(0.9), in_a), optax.sgd(1e-3)),
        "multi_transform": lambda: optax.multi_transform({"a": adam, "b": optax.sgd(1e-3)}, partly),
        "partition": lambda: optax.partition({"a": adam, "b": optax.set_to_zero()}, partly),
        "muon": lambda: optax.contrib.muon(1e-2),
        "sm3": lambda: optax.sm3(1e-2),
        "adafactor": lambda: optax.adafactor(1e-2),
        "lars": lambda: optax.lars(1e-1),
        "block_rms": lambda: optax.chain(optax.clip_by_block_rms(1e-3), optax.sgd(1.0)),
        "noise": lambda: optax.chain(optax.add_noise(0.1, 0.1, 0), optax.sgd(1e-3)),
        "noisy_sgd": lambda: optax.noisy_sgd(1e-3, key=0),
        "plateau": lambda: optax.chain(adam, optax.contrib.reduce_on_plateau(patience=1, rtol=1.0)),
        "apply_every": lambda: optax.chain(adam, optax.apply_every(3)),
        "apply_if_finite": lambda: optax.apply_if_finite(adam, 3),
        "injected": lambda: optax.inject_hyperparams(optax.adamw)(1e-2),
        "scheduled": lambda: optax.adamw(optax.cosine_decay_schedule(1e-2, NUM_STEPS)),
        "ema": lambda: optax.chain(optax.ema(0.9), optax.sgd(1e-3)),
        "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-2),
        "prodigy": lambda: optax.contrib.prodigy(),
        "low_precision": lambda: optax.adam(1e-2, mu_dtype="bfloat16"),
        "lookahead_like": lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.lamb(1e-2)),
        "amsgrad": lambda: optax.amsgrad(1e-2),
        "rprop": lambda: optax.rprop(1e-2),
        "novograd": lambda: optax.novograd(1e-2),
        "sam": lambda: optax.contrib.sam(
            adam, optax.chain(optax.contrib.normalize(), optax.sgd(0.1))
        ),
        "adadelta": lambda: optax.adadelta(1.0),
        "freeze": lambda: optax.chain(adam, optax.transforms.freeze(in_a)),
        "monitor": lambda: optax.chain(optax.monitor({"norm": optax.tree.norm}), adam),
        # Its first step divides by epsilon.
        "acprop": lambda: optax.contrib.acprop(1e-3, eps=1e-2),
    }
    constructor = table.get(name)
    if constructor is not None:
        return constructor()
    rate = 1.0 if name in PARAMETER_FREE else 1e-3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return (getattr(optax, name, None) or getattr(optax.contrib, name))(learning_rate=rate)


FAST = ["multi_steps", "muon", "adafactor", "noise"]
LONG = [
    *("masked", "multi_transform", "partition", "block_rms", "plateau", "apply_every", "ema"),
    *("apply_if_finite", "injected", "scheduled", "low_precision", "lookahead_like", "freeze"),
    *("schedule_free", "two traces", "momo", "sam"),
]
# Every function of optax that makes an optimizer from a learning rate
ALONE = [
    *("adabelief", "adadelta", "adagrad", "adam", "adamax", "adamaxw", "adamw", "adan", "amsgrad"),
    *("fromage", "lamb", "lars", "lion", "nadam", "nadamw", "noisy_sgd", "novograd"),
    *("optimistic_adam", "optimistic_adam_v2", "optimistic_gradient_descent", "radam", "rmsprop"),
    *("rprop", "sgd", "sign_sgd", "signum", "sm3", "yogi"),
    *("acprop", "ademamix", "adopt", "cocob", "dadapt_adamw", "dog", "dowg", "galore", "madgrad"),
    *("momo_adam", "prodigy", "schedule_free_adamw", "schedule_free_sgd", "simplified_ademamix"),
]
PARAMETER_FREE = ("cocob", "dadapt_adamw", "dog", "dowg", "prodigy")
REFUSED = {"lbfgs": "'value_fn'", "sophia": "obj_fn must be provided", "monitor": "structure"}
# Parts of others, or with more arguments: per-example gradients, another optimizer
OTHERS = {"scale_by_learning_rate", "scale_by_rprop", "scale_by_madgrad", "dpsgd"}
MESHES = [("full_shard", 1, 8), ("hybrid_shard", 2, 4), ("no_shard", 8, 1)]


def init_fn(key):
    def normal(at, *shape):
        return 0.1 * jax.random.normal(jax.random.fold_in(key, at), shape, jnp.float64)

    # Neither 8 nor 3 devices divide `wide`, so it is padded.
    layers = {"down": normal(0, 2, 16, 8), "up": normal(1, 2, 8, 16)}
    return {"b": normal(2, 8), "layers": layers, "wide": normal(3, 257, 263)}


def batches():
    draw = np.random.default_rng(0)
    return [{"x": draw.normal(size=(24, 8)), "y": draw.normal(size=24)} for _ in range(NUM_STEPS)]


def block(layer, x):
    return x + jnp.tanh(x @ layer["up"]) @ layer["down"]


def loss_of(params, x, batch):
    wide = jnp.sum(params["wide"][:8, -8:] * jnp.cos(params["wide"][-8:, :8]))
    error = (x + params["b"]).sum(-1) * (1 + wide) - batch["y"]
    return jnp.square(error).sum(), jnp.asarray(len(x))


@cache
def on_one_device(name):
    tx = optax.with_extra_args_support(optimizer(name))

    def loss(params, batch):
        x = batch["x"]
        for at in range(2):
            x = block(jax.tree.map(lambda leaf: leaf[at], params["layers"]), x)  # noqa: B023
        total, count = loss_of(params, x, batch)
        return total / count

    @jax.jit
    def step(params, state, batch):
        found, grads = jax.value_and_grad(loss)(params, batch)
        told = {} if name == "sam" else {"value": found}
        updates, state = tx.update(grads, state, params, **told)
        return optax.apply_updates(params, updates), state, found

    params = jax.jit(init_fn)(jax.random.key(0))
    state = jax.jit(tx.init)(params)
    for batch in batches():
        params, state, _ = step(params, state, batch)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(params)]


def setup(name, strategy, replicate, shard):
    """The plan on a mesh, and the step of an optimizer."""
    mesh = fj.make_mesh(replicate, shard, devices=jax.devices()[: replicate * shard])
    shapes = jax.eval_shape(init_fn, jax.random.key(0))
    plan = fj.plan(shapes, {"strategy": strategy}, mesh, blocks=["layers"])

    def loss(params, batch):
        x = fj.scan_blocks(block, batch["x"], params["layers"], plan)
        return loss_of(params, x, batch)

    return plan, fj.train_step(plan, loss, optimizer(name))


def resumed(name, folder, mesh):
    """Largest differences of weights from one device's: uninterrupted, and resumed elsewhere."""

    def run(step, state, some):
        for batch in some:
            state, _ = step(state, batch)
        return state

    plan, step = setup(name, *mesh)
    state = fj.init(plan, init_fn, optimizer(name), jax.random.key(0))
    state = run(step, state, batches()[:SAVED_AFTER])
    path = fj.save(folder, state, step=SAVED_AFTER)
    straight = run(step, state, batches()[SAVED_AFTER:])
    plan, step = setup(name, "full_shard", 1, 3)
    elsewhere = run(step, fj.load(plan, path, optimizer(name)), batches()[SAVED_AFTER:])
    wanted = on_one_device(name)
    start = jax.tree.leaves(jax.jit(init_fn)(jax.random.key(0)))

    def apart(state):
        found = jax.tree.leaves(fj.full_params(state))
        return max(np.abs(a - b).max() for a, b in zip(found, wanted, strict=True))

    moved = max(np.abs(a - b).max() for a, b in zip(start, wanted, strict=True))
    return apart(straight), apart(elsewhere), moved


GRID = [(name, MESHES[0]) for name in FAST]
GRID += [
    pytest.param(name, MESHES[at % 3], marks=pytest.mark.long)
    for at, name in enumerate((*LONG, *ALONE))
]
GRID += [
    pytest.param(name, mesh, marks=pytest.mark.slow)
    for at, name in enumerate((*LONG, *ALONE))
    for mesh in MESHES
    if mesh != MESHES[at % 3]
]


@pytest.mark.short(1)
@pytest.mark.parametrize(("name", "mesh"), GRID)
def test_an_optimizer_of_optax_trains_as_on_one_device_and_resumes_elsewhere(
    devices, tmp_path, name, mesh
):
    straight, elsewhere, moved = devices(resumed, name, tmp_path, mesh)
    # bfloat16 moments sometimes round differences in the last bits of float64.
    bound = 1e-4 if name == "low_precision" else 1e-9
    assert moved > 1e-6
    assert straight < bound
    assert elsewhere < bound


def said(name):
    plan, step = setup(name, "full_shard", 1, 8)
    state = fj.init(plan, init_fn, optimizer(name), jax.random.key(0))
    try:
        step(state, batches()[0])
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.short(1)
@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_calls_the_loss_or_changes_the_form_of_its_state_is_refused(
    devices, name
):
    found = devices(said, name)
    assert found.startswith("tx: expected an optimizer that updates from gradients")
    assert REFUSED[name] in found


def made_from_a_rate():
    found = set()
    for module in (optax, optax.contrib):
        for name, member in inspect.getmembers(module, inspect.isfunction):
            if not name.startswith("_") and "learning_rate" in inspect.signature(member).parameters:
                found.add(name)
    return found


def test_every_optimizer_of_optax_is_tested(devices):
    assert devices(made_from_a_rate) <= {*FAST, *LONG, *ALONE, *REFUSED, *OTHERS}
