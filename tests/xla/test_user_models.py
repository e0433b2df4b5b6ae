"""Models of other libraries train as on one device, and communicate as planned."""

from functools import partial
from unittest.mock import patch

import pytest

from support.lazy import fj, fx, jax, optax, user_models

NUM_STEPS, SAVED_AFTER = 3, 1
MESHES = {
    "8": ("full_shard", 1, 8),
    "2x4": ("hybrid_shard", 2, 4),
    "1x8": ("shard_grad_op", 1, 8),
    "8x1": ("no_shard", 8, 1),
}
NAMES = [
    *("linen_cnn", "nnx_vit", "equinox_mlp", "equinox_batchnorm", "rnn", "experts", "diffusion"),
    *("lora", "mixed"),
]
FAST = [("equinox_mlp", "adamw", "2x4"), ("lora", "muon", "8")]
LONG = [(name, "adamw", mesh) for name in NAMES for mesh in MESHES]
SLOW = [(name, tx, mesh) for name in NAMES for tx in ("muon", "adafactor") for mesh in MESHES]
GRID = [
    *FAST,
    *(pytest.param(*case, marks=pytest.mark.long) for case in LONG if case not in FAST),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW if case not in FAST),
]


_ALONE = {}  # results of one device by model and optimizer, cached because they compile slowly


def optimizer(name):
    match name:  # large epsilons: some gradients are zero except for rounding
        case "adamw":
            return optax.adamw(1e-2, eps=1e-3)
        case "muon":
            return optax.contrib.muon(1e-2, eps=1e-3)
        case _:
            return optax.adafactor(1e-2, eps=1e-6)


def trained(name, tx_name, mesh_name, folder, recompute="none"):
    """Differences from one device, and collectives as compiled and as planned."""
    model, tx = user_models.MODELS[name](), optimizer(tx_name)
    more = {"rng": jax.random.key(7)} if model.has_rng else {}

    def setup(strategy, *sizes):
        config = {"strategy": strategy, "activation_checkpointing": recompute}
        return user_models.planned_step(model, tx, config, fj.make_mesh(*sizes))

    def run(step, state, first, stop):
        losses = []
        for at in range(first, stop):
            state, metrics = step(state, user_models.images(at), **more)
            losses.append(float(metrics["loss"]))
        return state, losses

    plan, step = setup(*MESHES[mesh_name])
    state = fj.shard(plan, model.params, tx, model.variables)
    start = fj.full_params(state)  # in the master dtype
    collectives = user_models.moved(plan, step, state, user_models.images(0), **more)
    state, losses = run(step, state, 0, SAVED_AFTER)
    path = fj.save(folder, state, step=SAVED_AFTER)
    state, rest = run(step, state, SAVED_AFTER, NUM_STEPS)
    elsewhere, step = setup(*MESHES["2x4" if mesh_name != "2x4" else "8"])
    resumed = fj.load(elsewhere, path, tx, model.variables)
    resumed, again = run(step, resumed, SAVED_AFTER, NUM_STEPS)
    num_parts = 8 if model.has_rng or model.variables is not None else 1
    if (name, tx_name) not in _ALONE:
        parts = partial(user_models.trainable, plan)
        _ALONE[name, tx_name] = user_models.alone(model, start, tx, NUM_STEPS, num_parts, parts)
    wanted = _ALONE[name, tx_name]
    return {
        "losses": user_models.apart(([*losses, *rest], wanted[0])),
        "losses resumed": user_models.apart((again, wanted[0][SAVED_AFTER:])),
        "parameters": user_models.apart((fj.full_params(state), wanted[1])),
        "parameters resumed": user_models.apart((fj.full_params(resumed), wanted[1])),
        "variables": user_models.apart((state.variables, wanted[2])),
        "variables resumed": user_models.apart((resumed.variables, wanted[2])),
        "moved": user_models.apart((start, wanted[1])),
    }, collectives


@pytest.mark.short(1)
@pytest.mark.parametrize(("name", "tx", "mesh"), GRID)
def test_a_users_model_trains_as_on_one_device_and_resumes_elsewhere(
    devices, tmp_path, name, tx, mesh
):
    found, (census, planned) = devices(trained, name, tx, mesh, tmp_path)
    assert found.pop("moved") > 1e-4
    # NNX computes attention's softmax in float32, `mixed` everything.
    bound = {"nnx_vit": 1e-6, "mixed": 1e-4}.get(name, 1e-11)
    assert max(found.values()) < bound, found
    assert census == planned


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        ("experts", "every_2"),
        pytest.param("rnn", "block", marks=pytest.mark.long),
        pytest.param("lora", "selective", marks=pytest.mark.long),
        pytest.param("nnx_vit", "block", marks=pytest.mark.long),
    ],
)
def test_the_plan_equals_the_census_under_recompute(devices, tmp_path, name, recompute):
    found, (census, planned) = devices(trained, name, "adamw", "8", tmp_path, recompute)
    assert max(found["losses"], found["losses resumed"]) < 1e-6
    assert census == planned


def exchanged(name, config):
    """Collectives of a step with messages as between CPU processes, as compiled and as planned."""
    model, tx = user_models.MODELS[name](), optax.sgd(1e-2)
    plan, step = user_models.planned_step(model, tx, config, fj.make_mesh(2, 4))
    state = fj.shard(plan, model.params, tx, model.variables)
    more = {"rng": jax.random.key(7)} if model.has_rng else {}
    with patch.object(fx.gather, "over_gloo", lambda: True):
        return user_models.moved(plan, step, state, user_models.images(0), **more)


def normalized(num_samples):
    """Collectives of a step of Equinox's BatchNorm, which normalizes over all devices."""
    model, tx = user_models.MODELS["equinox_batchnorm"](), optax.sgd(1e-2)
    plan, step = user_models.planned_step(model, tx, None, fj.make_mesh(2, 4))
    state = fj.shard(plan, model.params, tx, model.variables)
    draw = user_models.images(0)
    batch = {name: draw[name].repeat(num_samples // 16, 0) for name in draw}
    return user_models.moved(plan, step, state, batch)[0]


def test_gradients_of_sums_over_samples_and_devices_have_no_row_per_sample(devices):
    assert devices(normalized, 64) == devices(normalized, 16)


NARROW = {"param_dtype": "bf16", "reduce_dtype": "bf16", "activation_checkpointing": "every_2"}


@pytest.mark.parametrize(
    ("name", "more"),
    [
        pytest.param("lora", NARROW, marks=pytest.mark.long),
        pytest.param("experts", {}, marks=pytest.mark.long),
        pytest.param("linen_cnn", NARROW, marks=pytest.mark.long),
    ],
)
def test_the_plan_counts_exchanges_between_cpu_processes(devices, name, more):
    census, planned = devices(exchanged, name, {"strategy": "hybrid_shard", **more})
    assert set(census) == {"all-to-all"}
    assert census == planned
