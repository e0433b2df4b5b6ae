"""Code of the FSDP tutorials for JAX works, with the results of one device."""

import contextlib
import io
import re
from pathlib import Path

import numpy as np
import pytest

from support.lazy import fj, jax, nnx, optax, user_models
from support.processes import python
from support.scripts import said_by

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["distributed/fsdp_sharding.py", "19_fsdp_sharding.py"])
def test_the_examples_run(name):
    """In a separate process, because an example sets the number of devices."""
    done = python(EXAMPLES / name)
    losses = [float(found) for found in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert losses[-1] < losses[0] / 4
    accuracies = re.findall(r"accuracy (\d\.\d+)", done.stdout)
    assert float((accuracies or ["1"])[-1]) > 0.9  # of ten classes
    assert "Savings: 87.5%" in done.stdout
    assert " 0.00 GB" not in done.stdout


def nnx_training():
    """Losses on eight devices and on one; shardings before and after; the printed output."""

    def losses(num_devices, make_state):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:num_devices]), ("fsdp",))
        state = make_state(mesh)
        step = fj.create_fsdp_train_step(mesh)
        before = [spec for *_, spec in fj.sharding_table(nnx.state(state.model))]
        generator, found = np.random.default_rng(0), []
        for _ in range(3):
            ids = generator.integers(0, 50, (16, 6))
            state, loss, _ = step(state, {"input_ids": ids, "label": np.eye(8)[ids[:, 0] % 8]})
            found.append(float(loss))
        after = [spec for *_, spec in fj.sharding_table(nnx.state(state.model))]
        moments = [spec for *_, spec in fj.sharding_table(nnx.state(state))]
        return found, before == after, sum(spec == before[0] for spec in moments)

    def sharded(mesh):
        graph, params = nnx.split(user_models.nnx_classifier(nnx.Rngs(0)))
        with jax.set_mesh(mesh):
            params = fj.shard_fsdp(params, threshold=100)
        return nnx.ModelAndOptimizer(nnx.merge(graph, params), optax.adam(1e-2))

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        shapes = {"w": jax.ShapeDtypeStruct((1_000_000_000,), "float32")}
        found = fj.analyze_memory(shapes, 8)
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",))
        tree = {"a": {"small": np.ones(8)}, "large": np.ones((32, 32))}
        placed = fj.selective_fsdp(tree, 1000, mesh=mesh)
        fj.print_sharding(placed)
        jax.tree_util.tree_map_with_path(fj.print_sharding, placed)  # name in the tutorial
    model = user_models.nnx_classifier(nnx.Rngs(0))
    one = losses(1, lambda _: nnx.ModelAndOptimizer(model, optax.adam(1e-2)))
    return losses(8, sharded), one, found, out.getvalue()


def test_a_sharded_nnx_model_trains_as_on_one_device(devices):
    (found, stays, num_like_embedding), (wanted, *_), memory, printed = devices(nnx_training)
    assert found == pytest.approx(wanted, rel=1e-5)
    assert stays
    assert num_like_embedding >= 3  # the embedding and both of its moments
    assert memory["without_bytes"] == 16_000_000_000
    for text in ("Memory Analysis:", "Total parameters: 1,000,000,000", "Model size: 4.00 GB"):
        assert text in printed
    for text in ("WITHOUT FSDP:", "Per device: 16.00 GB (", "Total: 128.00 GB (8 devices)"):
        assert text in printed
    for text in ("WITH FSDP:", "Per device: 2.00 GB", "Savings: 87.5%", "8.0\u00d7 larger model!"):
        assert text in printed
    assert "Replicating: a/small (8 elements)\nSharding: large (1,024 elements)\n" in printed
    line = f"{'a/small':50s} {'(8,)':20s} P()\n{'large':50s} {'(32, 32)':20s} P('fsdp',)\n"
    assert printed.endswith(line + line)


def refusals():
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",))
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    state = nnx.ModelAndOptimizer(model, optax.sgd(0.1))
    step, rows = fj.create_fsdp_train_step(mesh), np.ones((16, 2))
    linear = nnx.Sequential(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), lambda x: x[:, 0])
    one_logit = nnx.ModelAndOptimizer(linear, optax.sgd(0.1))
    attempts = (
        lambda: fj.shard_fsdp({"w": np.ones(8)}),
        lambda: fj.create_fsdp_train_step(mesh)(optimizer, {}),
        lambda: fj.plan({"w": np.ones(8)}, {"strategy": "no_shard"}, fj.make_mesh()),
        lambda: fj.plan({"w": np.ones(8, int)}),
        lambda: fj.make_mesh(3, 3),
        lambda: fj.plan({"w": np.ones(8)}, None, mesh),
        lambda: fj.plan({"w": np.ones(8)}, blocks=["layers"]),
        lambda: fj.create_fsdp_train_step(fj.make_mesh()),
        lambda: fj.analyze_memory({}, 0),
        lambda: step(state, {"input_ids": rows, "label": np.full(16, 0.7)}),
        lambda: step(one_logit, {"input_ids": rows, "label": np.ones(16)}),
        lambda: fj.create_fsdp_train_step(mesh, lambda *_: (8.0, 16))(state, rows),
        lambda: step(state, {"input_ids": np.ones(16)}),
        lambda: step(state, {"input_ids": np.ones(15), "label": np.ones(15)}),
    )
    said = said_by(attempts)
    _, below, _ = step(state, {"input_ids": rows, "label": np.full(16, -1)})
    return said, bool(np.isnan(below))


def test_mistakes_are_named_with_the_remedy(devices):
    said, is_nan = devices(refusals)
    assert [text.partition(":")[0] for text in said] == [
        "mesh",
        "create_fsdp_train_step",
        "mesh",
        "w",
        "replicate x shard",
        "mesh",
        "blocks",
        "mesh",
        "num_devices",
        *["batch"] * 2,
        "loss_fn",
        "batch",
        "batch['input_ids']",
    ]
    assert "'label' or 'labels', got 'input_ids'. Add the missing one, or pass" in said[-2]
    assert "that 8 devices divide; got shape (15,). Drop some (drop_last of your" in said[-1]
    assert "nnx.ModelAndOptimizer(model, tx)" in said[1]
    assert "got float64 of shape (16,). For another task pass" in said[10]
    assert is_nan  # a label that is neither a class nor ignored
