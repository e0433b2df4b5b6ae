"""Losses with keys, metrics, variables and regularizers equal those of one device."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from support.lazy import fj, jax, jnp, optax, train_state
from support.scripts import said_by

NUM_PARTS, NUM_MICRO, SAMPLES, WIDTH, LAYERS, NUM_STEPS = 4, 2, 32, 16, 4, 2


def parameters():
    key = jax.random.key(0)
    w = 0.3 * jax.random.normal(key, (LAYERS, WIDTH, WIDTH), jnp.float64)
    return {"head": jnp.ones((WIDTH,), jnp.float64), "layers": {"w": w}}


def batches():
    draw = np.random.default_rng(0)
    some = [draw.normal(size=(NUM_MICRO, SAMPLES, WIDTH)) for _ in range(NUM_STEPS)]
    return [{"x": x, "y": np.sign(x.sum(-1)), "counts": x[..., 0] > 0} for x in some]


def loss_of(run_layers, params, batch, rng, variables):
    """Dropout per layer, running averages, a regularizer, a metric, ragged labels."""

    def block(layer, x, key):
        kept = jax.random.bernoulli(key, 0.8, x.shape)
        x = x + jnp.tanh(x @ layer["w"]) * kept / 0.8
        return x, jnp.square(x).mean()

    x = batch["x"] - variables["mean"]
    x, sizes = run_layers(block, x, params["layers"], jax.random.split(rng, LAYERS))
    error = jnp.square(x @ params["head"] - batch["y"])
    counts = batch["counts"]
    count = counts.sum()
    total = (error * counts).sum() + count * 0.1 * jnp.square(params["head"]).sum()
    right = (jnp.sign(x @ params["head"]) == batch["y"]) & counts
    new = {"mean": 0.9 * variables["mean"] + 0.1 * x.mean(0), "seen": variables["seen"] + count}
    new |= {"any": x[0, 0] > 0, "key": jax.random.fold_in(variables["key"], count)}
    return total, count, {"sums": {"right": right.sum()}, "sizes": sizes * count}, new


def variables():
    """One per rule; each device changes those without floating-point values differently."""
    own = {"any": jnp.zeros((), bool), "key": jax.random.key(1), "seen": -jnp.ones((), jnp.int32)}
    return {"mean": jnp.zeros(WIDTH, jnp.float64), **own}


def read(variables):
    """Returns numpy arrays, with the key's data."""
    found = {**variables, "key": jax.random.key_data(variables["key"])}
    return {name: np.asarray(leaf) for name, leaf in found.items()}


def on_devices(folder, recompute):
    """Losses, accuracies, sizes, final averages and the head; resumed on other devices."""
    tx = optax.sgd(1e-2)
    params, odd = parameters(), {"odd": jax.numpy.ones(7)}
    whole = fj.plan(odd, None, fj.make_mesh(1, 4, devices=jax.devices()[:4]))
    again = fj.train_step(whole, lambda p, b: (p["odd"].sum(), b.sum()), tx)
    again(fj.shard(whole, odd, tx), np.ones(8))
    found = []
    for step_number, batch in enumerate(batches()):
        replicate, shard = [(2, 2), (1, 4)][step_number]
        mesh = fj.make_mesh(replicate, shard, devices=jax.devices()[:NUM_PARTS])
        strategy = "hybrid_shard" if replicate > 1 else "full_shard"
        config = {"strategy": strategy, "activation_checkpointing": recompute}
        plan = fj.plan(params, config, mesh, blocks=["layers"])

        def loss(params, batch, rng, variables):
            def layers(block, x, shards, keys):
                return fj.scan_blocks(block, x, shards, plan, inputs=keys, outputs=True)  # noqa: B023

            return loss_of(layers, params, batch, rng, variables)

        step = fj.train_step(plan, loss, tx, num_micro_batches=NUM_MICRO)
        if step_number == 0:
            state = fj.shard(plan, params, tx, variables())
        else:
            state = fj.load(plan, folder, tx, variables())
        state, metrics = step(state, batch, rng=jax.random.key(7))
        fj.save(folder, state, step=10 * (step_number + 1), epoch=3, note="kept")
        found.append([np.asarray(metrics[name]) for name in ("loss", "sizes")])
        found[-1].append(np.asarray(metrics["sums"]["right"]))
    assert float(params["head"][0]) == float(odd["odd"][0]) == 1.0  # the caller's arrays
    assert fj.load_values(folder) == {"epoch": 3, "note": "kept", "step": 10 * NUM_STEPS}
    copies = {str(shard.data) for shard in state.variables["seen"].addressable_shards}
    last = {**read(state.variables), "copies": len(copies)}
    return found, last, fj.full_params(state)["head"]


def on_one_device():
    """Computes the same, each part of the global batch in turn with its key."""

    def layers(block, x, stacked, keys):
        sizes = []
        for at in range(LAYERS):
            x, size = block({"w": stacked["w"][at]}, x, keys[at])
            sizes.append(size)
        return x, jnp.stack(sizes)

    @jax.jit  # one part at a time: all together would compile for seconds
    def value_and_grad(params, *given):
        def loss(params):
            total, *more = loss_of(layers, params, *given)
            return total, more

        return jax.value_and_grad(loss, has_aux=True)(params)

    params, now, found = parameters(), variables(), []
    for at, batch in enumerate(batches()):
        key = jax.random.fold_in(jax.random.key(7), at)
        sums, own = [], [now] * NUM_PARTS
        for micro in range(NUM_MICRO):
            for device in range(NUM_PARTS):
                size = SAMPLES // NUM_PARTS
                part = {n: v[micro, device * size :][:size] for n, v in batch.items()}
                its = jax.random.fold_in(key, micro * NUM_PARTS + device)
                (loss, more), grads = value_and_grad(params, part, its, own[device])
                count, metrics, own[device] = more
                sums.append((loss, count, metrics, grads))
        now = {**own[0], "mean": sum(each["mean"] for each in own) / NUM_PARTS}
        count = sum(each[1] for each in sums)
        loss, _, metrics, grads = jax.tree.map(lambda *values: sum(values) / count, *sums)  # noqa: B023
        params = jax.tree.map(lambda p, g: p - 1e-2 * g, params, grads)
        means = loss, metrics["sizes"], metrics["sums"]["right"]
        found.append([np.asarray(value) for value in means])
    return found, read(now), np.asarray(params["head"])


@pytest.mark.parametrize("recompute", ["none", pytest.param("every_3", marks=pytest.mark.long)])
def test_keys_metrics_variables_and_regularizers_are_those_of_one_device(
    devices, tmp_path, recompute
):
    found, last, head = devices(on_devices, tmp_path, recompute)
    wanted, wanted_last, wanted_head = devices(on_one_device)
    for step, wanted_step in zip(found, wanted, strict=True):
        for value, wanted_value in zip(step, wanted_step, strict=True):
            assert value == pytest.approx(wanted_value, rel=1e-10)
    assert last.pop("copies") == 1
    assert last.pop("mean") == pytest.approx(wanted_last.pop("mean"), abs=1e-12)
    assert {name: value.tolist() for name, value in last.items()} == {
        name: value.tolist() for name, value in wanted_last.items()
    }
    assert head == pytest.approx(wanted_head, rel=1e-10)


def counted(dtype, num_tokens):
    """Tokens of a step whose loss is in a small dtype, and the norm of its gradient."""
    mesh = fj.make_mesh(1, 4, devices=jax.devices()[:4])
    plan = fj.plan({"w": jax.ShapeDtypeStruct((8,), jnp.float32)}, None, mesh)

    def loss(params, batch):
        errors = params["w"].sum() * batch["x"]
        return errors.sum().astype(dtype), jnp.asarray(len(batch["x"]))

    step = fj.train_step(plan, loss, optax.sgd(1e-3))
    state = fj.shard(plan, {"w": jnp.ones(8)}, optax.sgd(1e-3))
    x = np.full(num_tokens, 1e-2, np.float32)
    state, metrics = step(state, {"x": x})
    total, count = fj.eval_step(plan, loss)(state, {"x": x})
    assert int(count) == int(metrics["num_tokens"])
    assert float(total) > 0
    return int(count), float(metrics["grad_norm"])


def counted_beyond_int32():
    """A step and an evaluation on 4 devices; each counts nearly 2^31 labels in int32."""
    mesh = fj.make_mesh(1, 4, devices=jax.devices()[:4])
    with jax.enable_x64(False):
        plan = fj.plan({"w": jax.ShapeDtypeStruct((8,), jnp.float32)}, None, mesh)

        def loss(params, batch):
            count = jnp.int32(2**31 - 8) + batch.astype(jnp.int32).sum()
            return params["w"].sum() * count, count, {"seen": -count}

        batch, tx = np.ones((2, 4), np.float32), optax.sgd(1.0)
        step = fj.train_step(plan, loss, tx, num_micro_batches=2)
        state, metrics = step(fj.shard(plan, {"w": jnp.ones(8)}, tx), batch)
        found = fj.eval_step(plan, loss)(state, batch[0])
    moved = np.asarray(state.params["w"]).tolist()
    return moved, jax.tree.map(float, metrics), jax.tree.map(float, found)


def test_counts_and_metrics_in_int32_do_not_wrap(devices):
    moved, metrics, (total, count, seen) = devices(counted_beyond_int32)
    assert moved == pytest.approx([0.0] * 8, abs=1e-6)
    assert (metrics["loss"], metrics["seen"]) == pytest.approx((8.0, -1.0))
    assert metrics["num_tokens"] == count == pytest.approx(2**31 - 1)
    assert (total, seen["seen"]) == pytest.approx((0.0, -(2**31)), abs=1e5)


def with_metrics_alone():
    """Metrics of a loss without variables and with a batch of scalars; the tutorial's loss."""
    mesh = fj.make_mesh(1, 4, devices=jax.devices()[:4])
    plan = fj.plan({"w": jax.ShapeDtypeStruct((8,), jnp.float32)}, None, mesh)

    def loss(params, batch):
        count = jnp.asarray(len(batch["x"]))
        x = batch["x"] * batch["scale"]
        return params["w"].sum() * x.sum(), count, {"seen": x.sum()}

    def made():
        return fj.shard(plan, {"w": jnp.ones(8)}, optax.sgd(0.1))

    x = np.arange(12, dtype=np.float32)
    found = fj.eval_step(plan, loss)(made(), {"x": x, "scale": 2})
    means = []
    for micro, batch in (
        (1, {"x": x, "scale": 2}),
        (3, {"x": np.stack([x] * 3), "scale": 2}),
        (3, {"x": np.stack([x] * 3), "scale": np.array([1, 2, 3])}),  # one per micro-batch
    ):
        step = fj.train_step(plan, loss, optax.sgd(0.1), num_micro_batches=micro)
        means.append(float(step(made(), batch)[1]["seen"]))
    tree = train_state.TrainState.create(
        apply_fn=None, params={"w": jnp.ones(8)}, tx=optax.sgd(0.1)
    )
    fsdp = jax.make_mesh((8,), ("fsdp",))
    step = fj.create_fsdp_train_step(fsdp, lambda p, b: loss(p, b)[0] / 8)
    _, value, _ = step(tree, {"x": x[:8], "scale": 2})
    found = [float(found[0]), int(found[1]), float(found[2]["seen"])]
    return means, found, float(value)


def test_a_loss_may_return_metrics_and_no_variables_and_its_batch_have_scalars(devices):
    means, found, tutorial = devices(with_metrics_alone)
    assert found == [2 * 8 * 66.0, 12, 2 * 66.0]
    assert means == pytest.approx([2 * 66 / 12] * 3)
    assert tutorial == 2 * 28.0


@pytest.mark.parametrize(("dtype", "num_tokens"), [("bfloat16", 2056), ("float16", 70_000)])
def test_tokens_are_counted_exactly_whatever_the_dtype_of_the_loss(devices, dtype, num_tokens):
    count, norm = devices(counted, dtype, num_tokens)
    assert count == num_tokens
    assert norm == pytest.approx(8**0.5 * 1e-2, rel=1e-2)


def stepped_variables():
    """Variables before and after a step that keeps them."""
    values = {
        "float8_e4m3fn": [1.5, -448.0],
        "bfloat16": [3e38, -1.0],
        "int8": [-128, 127],
        "uint32": [2**32 - 1, 7],
        "bool": [True, False],
    }
    given = {dtype: jnp.asarray(value, dtype) for dtype, value in values.items()}
    plan, tx = fj.plan({"w": jnp.ones(8)}, None, fj.make_mesh(2, 4)), optax.sgd(0.1)

    def loss(params, batch, variables):
        return params["w"].sum() * batch.sum(), len(batch), None, variables

    state = fj.shard(plan, {"w": jnp.ones(8)}, tx, given)
    state, _ = fj.train_step(plan, loss, tx)(state, np.ones(8))
    return [{k: (str(x.dtype), str(x)) for k, x in of.items()} for of in (given, state.variables)]


def test_variables_of_every_kind_of_number_keep_their_values(devices):
    given, found = devices(stepped_variables)
    assert found == given


def unmatched(said, wanted):
    pairs = zip(said, wanted, strict=True)
    return [text for text, pattern in pairs if not re.search(pattern, text)]


def wrong_losses():
    """Errors of each loss."""
    tree = {"layers": {"w": jnp.ones((4, 8, 8))}, "head": jnp.ones((8, 8))}
    plan = fj.plan(tree, None, fj.make_mesh(1, 8), blocks=["layers"])
    batch = {"x": np.ones((16, 8))}

    def run(loss, tx=None, **more):
        sgd = optax.sgd(1e-3)
        return fj.train_step(plan, loss, tx or sgd, **more)(fj.shard(plan, tree, sgd), batch)

    def scanned(params, batch):
        x = fj.scan_blocks(lambda layer, x: x @ layer["w"], batch["x"], params["layers"], plan)
        return (x @ params["head"]).sum()

    def forgets(params, batch):
        x = batch["x"]
        for at in range(4):
            x = x * params["layers"]["w"][at].sum()
        return x.sum() + params["head"].sum(), jnp.asarray(len(x))

    def decays(params, batch):
        norm = sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(params))
        return scanned(params, batch) + len(batch["x"]) * norm, len(batch["x"])

    linear = lambda params, batch: (batch["x"].sum() * params["head"].sum(), 1)  # noqa: E731
    return said_by(
        (
            lambda: run(scanned),
            lambda: run(lambda params, batch: (scanned(params, batch), {"accuracy": 1})),
            lambda: run(lambda params, batch: (scanned(params, batch), jnp.ones(3))),
            lambda: run(lambda params, batch: (scanned(params, batch), 1, {"loss": 1.0})),
            lambda: run(lambda params, batch, rng: forgets(params, batch)),
            lambda: run(forgets),
            lambda: run(decays),
            lambda: fj.eval_step(plan, decays)(fj.shard(plan, tree), batch),
            lambda: run(linear, optax.adam(1e-3)),
            lambda: run(linear, num_micro_batches=2),
            lambda: run(linear, num_micro_batches=0),
            lambda: run(linear, max_grad_norm=-1.0),
            lambda: run(lambda params, batch: (linear(params, batch)[0], batch["x"].any())),
            lambda: run(lambda params, batch: (*linear(params, batch), {"spectrum": 1j})),
        )
    )


def test_mistakes_of_losses_are_named(devices):
    wanted = [
        "got .*Tracer",
        "a count that is a dict",
        r"a count of shape \(3,\)",
        "'loss', which the step uses",
        r"^loss_fn: expected a function of \(params, batch\): missing .* 'rng'",
        *["^loss_fn: expected layers.w to be gathered"] * 3,
        "^state: expected the optimizer state of the step's tx",
        r"^batch\['x'\]: expected 2 micro-batches, .*; got shape \(16, 8\)",
        "num_micro_batches of 1 or more, .*; got 0 and None",
        "max_grad_norm of 0 or more; got 1 and -1.0",
        "got a count of bool",
        "got a metric of complex128",
    ]
    assert unmatched(devices(wrong_losses), wanted) == []


def mistakes():
    """Errors of each mistake."""
    mesh = fj.make_mesh(1, 8)
    tree = {"layers": {"w": jnp.ones((4, 8, 8))}, "head": jnp.ones((8, 8))}
    plan = fj.plan(tree, None, mesh)
    batch = {"x": torch.ones(16, 8)}  # from a DataLoader

    def told(tx, rate=0.0):
        def loss(params, batch):
            return (batch["x"] @ params["head"]).sum(), len(batch["x"])

        return fj.train_step(plan, loss, tx)(fj.shard(plan, tree, tx), batch, learning_rate=rate)

    def scanned():
        deep = fj.plan(tree, {"activation_checkpointing": "every_2"}, mesh, blocks=["layers"])
        return fj.scan_blocks(None, batch["x"], tree["layers"], deep, inputs=np.ones((6, 8)))

    def placed(batch):
        step = fj.train_step(plan, lambda *_: (0.0, 1), optax.sgd(1e-3))
        return step(fj.shard(plan, tree, optax.sgd(1e-3)), batch)

    injected = optax.inject_hyperparams(optax.sgd)
    cast = optax.inject_hyperparams(optax.sgd, hyperparam_dtype=jnp.float32)
    others = {"layers": {"v": tree["layers"]["w"]}, "head": tree["head"]}
    said = said_by(
        (
            lambda: told(optax.adam(1e-3)),
            lambda: told(injected(optax.constant_schedule(1e-3))),
            lambda: told(cast(optax.constant_schedule(1e-3))),
            lambda: told(injected(1e-3), np.zeros(8)),
            scanned,
            lambda: fj.shard(plan, others),
            lambda: fj.plan(tree, None, mesh, blocks=["lay*"]),
            lambda: fj.plan(tree, {"fp32_modules": ["haed"]}, mesh),
            lambda: fj.plan({"a.b": tree["head"], "a": {"b": tree["head"]}}, None, mesh),
            lambda: fj.plan(tree, {"tensor": 2}),
            lambda: fj.plan(tree, {"tensor": 4}, fj.make_mesh(tensor=2)),
            lambda: fj.plan(tree, {"expert": 2}),
            lambda: fj.make_mesh(tensor=3),
            lambda: placed({"x": torch.ones(16, 8, dtype=torch.bfloat16)}),
            lambda: placed({"x": np.ones((0, 8))}),
            lambda: fj.pad_batch({"label": np.ones(3, int), "labels": np.ones(3, int)}, 4),
            lambda: fj.pad_batch({"x": np.ones(3), "y": np.ones(3, int)}, 4),
            lambda: fj.pad_batch({"x": np.ones(3), "label": np.ones(3)}, 4),
            lambda: fj.pad_batch({"x": np.ones(2), "label": np.eye(2, dtype=int)}, 4),
            lambda: fj.pad_batch({"x": np.ones(5), "label": np.ones(5, int)}, 4),
            lambda: fj.pad_batch({"x": np.ones(0), "label": np.ones(0, int)}, 4),
            lambda: placed({"x": np.ones((16, 8)), "weights": np.ones(8)}),
        )
    )
    state, _ = told(injected(1e-3))
    return said, bool((fj.full_params(state)["head"] == 1).all())


def test_mistakes_of_trees_batches_and_optimizers_are_named(devices):
    said, unmoved = devices(mistakes)
    wanted = [
        *["^learning_rate: expected a number that the optimizer reads"] * 3,
        r"^step: expected numbers for the optimizer; got learning_rate of shape \(8,\)",
        r"^scan_blocks: expected inputs whose first axis is the 4 layers; got shape \(6, 8\)",
        "which has layers.w where this one has layers.v",
        "^blocks: expected paths of subtrees; got 'lay\\*'",
        "^fp32_modules: expected names .*; got 'haed'.*Did you mean 'head'",
        "^a.b: expected names that differ",
        "^tensor: expected 1 for a model of your own.* use shard_fsdp.params, mesh",
        "^tensor: expected 2, the mesh's; got 4",
        "^expert: expected 1 for a model of your own",
        "^tensor: expected a divisor of 8",
        r"^batch\['x'\]: expected an array that numpy reads; got Tensor .Got unsupported",
        r"^batch\['x'\]: expected 1 or more samples, .*; got shape \(0, 8\)",
        "expected the name of the labels among label, labels; got None",
        "expected the name of the labels among x, y; got None",
        "expected integers or floating rows of probabilities as label; got float64",
        "got int64 of shape .2, 2. that sum to 1.*one-hot rows floating",
        *["expected arrays of 1 to 4 samples"] * 2,
        r"^batch: expected one number of samples .*'weights'.\": 8",
    ]
    assert unmatched(said, wanted) == []
    assert unmoved


def wrong_states():
    """Errors of each state."""
    mesh, tree = fj.make_mesh(1, 8), {"w": jnp.ones((8, 8))}
    plan = fj.plan(tree, None, mesh)

    def trained(state, plan=plan):
        step = fj.train_step(plan, lambda *_: (0.0, jnp.int8(100)), optax.sgd(1e-3))
        return step(state, np.ones(8))

    def again():
        state = fj.shard(plan, tree, optax.sgd(1e-3))
        assert trained(state)[1]["num_tokens"] == 800  # although counts are int8
        return trained(state)  # jax 0.10 would let it crash the process

    def narrow():
        with jax.enable_x64(False):
            assert fj.plan({"w": np.ones(8)}).table.arrays[0].dtypes.master == "float32"
            return fj.plan(tree, {"master_dtype": "float64"}, mesh)

    def narrowed():
        state = fj.shard(plan, tree, optax.sgd(1e-3))
        halves = {name: leaf.astype(jnp.bfloat16) for name, leaf in state.params.items()}
        return trained(replace(state, params=halves))

    padded, rows = {"w": jnp.ones((301, 257))}, (fj.make_mesh(8, 1), fj.make_mesh(1, 8))
    others_plan, own_plan = (fj.plan(padded, None, rows_of) for rows_of in rows)
    return said_by(
        (
            again,
            lambda: trained(fj.shard(others_plan, padded, optax.sgd(1e-3)), own_plan),
            lambda: fj.eval_step(own_plan, lambda *_: (0.0, 1))(
                fj.shard(others_plan, padded), np.ones(8)
            ),
            lambda: trained(None, fj.plan(tree, None, mesh, freeze=["*"])),
            narrow,
            narrowed,
        )
    )


def test_impossible_states_and_plans_are_refused(devices):
    wanted = [
        "^state: .* got one that a step has used up",
        *["^state: expected arrays that are stored as in the step's plan"] * 2,
        "^plan: expected an array that is trained",
        "^master_dtype: expected float32 or less",
        "^state: expected the optimizer state .*, and parameters as planned",
    ]
    assert unmatched(devices(wrong_states), wanted) == []


def differentiated(replicate):
    """Differences between gradients of `eval_step`, with a batch of another mesh, and jax's."""
    params = {
        "layers": {"even": jnp.ones((3, 8, 8)) / 9, "odd": jnp.ones((3, 7))},
        "head": jnp.ones(8),
    }
    mesh = fj.make_mesh(replicate, 8 // replicate)
    plan = fj.plan(params, None, mesh, blocks=["layers"])
    state = fj.shard(plan, params)
    own = jax.sharding.NamedSharding(jax.make_mesh((8,), ("mine",)), jax.P("mine"))
    batch = jax.device_put(np.linspace(0.0, 1.0, 128).reshape(16, 8), own)

    def block(layer, x):
        return x + jnp.tanh(x @ layer["even"]) * layer["odd"].sum()

    def loss(params, batch):
        x = fj.scan_blocks(block, batch, params["layers"], plan)
        return jnp.square(x @ params["head"]).sum(), len(batch)

    def whole(params):
        x = jnp.asarray(np.asarray(batch))
        for at in range(3):
            x = block(jax.tree.map(lambda leaf, at=at: leaf[at], params["layers"]), x)
        return jnp.square(x @ params["head"]).sum()

    evaluate = fj.eval_step(plan, loss)
    found = jax.grad(lambda p: evaluate(replace(state, params=p), batch)[0])(state.params)
    wanted = jax.grad(whole)(params)
    found, wanted = jax.device_get((found, wanted))
    return jax.tree.leaves(jax.tree.map(lambda a, b: abs(a / b - 1).max(), found, wanted))


@pytest.mark.parametrize("replicate", [1, 2])
def test_the_gradient_of_an_evaluation_is_that_of_one_device(devices, replicate):
    assert max(devices(differentiated, replicate)) < 1e-9


def other_uses_of_a_state():
    """Evaluation in other dtypes, a step in a jax.jit, and the sum of flags."""
    tree, tx, rows = {"w": jnp.ones((8, 8))}, optax.sgd(0.0), np.ones((16, 8))
    plans = [fj.plan(tree, {"param_dtype": dtype}) for dtype in ("bfloat16", "float32")]
    plans.append(fj.plan({**tree}, {"param_dtype": "bfloat16"}, freeze=["w"]))

    def loss(params, batch):
        total = (batch.astype(params["w"].dtype) @ params["w"]).sum()
        return total, len(batch), {"flags": batch.any()}

    state = fj.shard(plans[0], tree, tx)
    found = [fj.eval_step(plan, loss)(state, rows) for plan in plans]
    step = fj.train_step(plans[0], loss, tx, num_micro_batches=2)
    batch = rows.reshape(2, 8, 8)
    _, metrics = jax.jit(lambda state, batch: step(state, batch))(state, batch)
    return [(float(total), flags["flags"].item()) for total, _, flags in found], metrics[
        "flags"
    ] * 16


def test_a_state_is_evaluated_in_other_dtypes_and_stepped_in_a_jit(devices):
    assert devices(other_uses_of_a_state) == ([(1024.0, 8)] * 3, 16)


def with_option(name):
    """XLA's error for a step with this option."""
    plan, tx = fj.plan({"w": jnp.ones(8)}, None, fj.make_mesh(1, 8)), optax.sgd(0.1)
    loss = lambda params, batch: (params["w"].sum() * batch.sum(), len(batch))  # noqa: E731
    step = fj.train_step(plan, loss, tx, compiler_options={name: True})
    try:
        step(fj.shard(plan, {"w": jnp.ones(8)}, tx), np.ones(8))
    except RuntimeError as error:
        return str(error)
    return ""


def test_compiler_options_reach_the_step_that_runs(devices):
    assert devices(with_option, "xla_cpu_enable_fast_math") == ""
    assert "xla_of_nobody" in devices(with_option, "xla_of_nobody")


def doubled():
    """Parameters after a step whose blocks use doubled weights, and after one by hand."""
    tree = {"layers": {"w": 0.1 * jax.random.normal(jax.random.key(0), (3, 8, 8))}}
    plan, tx = fj.plan(tree, None, fj.make_mesh(2, 4), blocks=["layers"]), optax.sgd(1e-1)
    batch = {"x": np.random.default_rng(0).normal(size=(16, 8))}

    def block(layer, x):
        return x + jnp.tanh(x @ layer["w"])

    def twice(params):
        return jax.tree.map(lambda leaf: (2 * leaf.T).T.astype(leaf.dtype), params["layers"])

    @jax.jit  # a decorated loss
    def loss(params, batch):
        x = fj.scan_blocks(block, batch["x"], twice(params), plan)
        return jnp.square(x).sum(), len(x)

    def by_hand(params):
        x = batch["x"]
        for at in range(3):
            x = block({"w": twice(params)["w"][at]}, x)
        return jnp.square(x).mean(0).sum()

    state, _ = fj.train_step(plan, loss, tx)(fj.shard(plan, tree, tx), batch)
    wanted = tree["layers"]["w"] - 0.1 * jax.grad(by_hand)(tree)["layers"]["w"]
    return np.abs(fj.full_params(state)["layers"]["w"] - wanted).max()


def test_shards_may_be_changed_elementwise_before_they_are_gathered(devices):
    assert devices(doubled) < 1e-12


def evaluated_integers():
    """An integer sum that float32 cannot represent exactly, and its negative."""
    tree = {"w": jnp.ones(8, "float32")}

    def loss(params, batch):
        many = batch["n"].sum()
        return params["w"].sum(), 1, {"many": many, "few": -many}

    plan = fj.plan(tree)
    return fj.eval_step(plan, loss)(
        fj.shard(plan, tree), {"n": np.array([2**24, *[1] * 7], "int32")}
    )[2]


def test_integers_that_a_loss_returns_are_summed_exactly(devices):
    assert devices(evaluated_integers) == {"many": 2**24 + 7, "few": -(2**24) - 7}


def padded():
    def of(rows, **names):
        return fj.pad_batch({"x": np.ones(len(rows)), "y": rows}, 4, **names)

    integers = of(np.array([3, 200], np.uint8), labels="y")["y"].tolist()
    hot = of(np.eye(3)[:2], labels="y")["y"].tolist()
    masked = of(np.array([0.5, 1.5]), mask="counts")
    return integers, hot, masked["y"].tolist(), masked["counts"].tolist()


def test_padded_labels_of_any_form_do_not_count(devices):
    integers, rows, values, mask = devices(padded)
    assert integers == [3, 200, -100, -100]
    assert rows == [[1, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert values == [0.5, 1.5, 1.5, 1.5]
    assert mask == [1, 1, 0, 0]
