"""The tutorial's step on other meshes, with other labels, and with annotated arrays."""

import dataclasses
import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest

from fullshard.errors import ConfigError
from fullshard.formats.detect import open_source
from support.lazy import fj, flax, jax, jnp, nnx, optax, orbax, user_models

CLASSES, SAMPLES = 8, 16


def first_losses(labels):
    """Loss and accuracy of the first step on several kinds of meshes; shardings of a batch."""
    ids = np.random.default_rng(0).integers(0, 50, (SAMPLES, 6))
    found, divided = [], []
    explicit = jax.make_mesh((8,), ("fsdp",))
    assert "Explicit" in str(explicit.axis_types)
    for mesh in (explicit, jax.make_mesh((2, 4), ("data", "fsdp"))):
        with jax.set_mesh(mesh):
            graph, params = nnx.split(user_models.nnx_classifier(nnx.Rngs(0)))
            params = fj.shard_fsdp(params, threshold=100)
        state = nnx.ModelAndOptimizer(nnx.merge(graph, params), optax.sgd(0.1))
        step = fj.create_fsdp_train_step(mesh)
        state, loss, metrics = step(state, {"input_ids": ids, "label": labels})
        found.append((float(loss), float(metrics["accuracy"])))

        def told(model, batch):
            x = batch["input_ids"]
            jax.debug.inspect_array_sharding(
                x,
                callback=lambda s: divided.append(s.shard_shape(ids.shape)[0]),
            )
            return model(x).mean()

        fj.create_fsdp_train_step(mesh, told)(state, {"input_ids": ids})
    return found, divided


def by_hand(labels):
    """Mean over the labels that are not ignored, on one device."""
    ids = np.random.default_rng(0).integers(0, 50, (SAMPLES, 6))
    logits = user_models.nnx_classifier(nnx.Rngs(0))(ids)
    likely = jax.nn.log_softmax(logits)
    if labels.ndim == 2:
        return float(-(labels * likely).sum(-1).mean())
    chosen = [-float(likely[row, label]) for row, label in enumerate(labels) if label != -100]
    assert not jnp.isnan(likely).any()
    return sum(chosen) / len(chosen)


def labels_of(kind):
    draw = np.random.default_rng(1)
    if kind == "soft":
        rows = draw.random((SAMPLES, CLASSES))
        return (rows / rows.sum(-1, keepdims=True)).astype(np.float32)
    labels = draw.integers(0, CLASSES, SAMPLES)
    labels[-5:] = -100
    return labels


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ignored", "soft"])
def test_ignored_and_soft_labels_on_explicit_axes_and_with_a_data_axis(devices, kind):
    labels = labels_of(kind)
    found, divided = devices(first_losses, labels)
    wanted = devices(by_hand, labels)
    assert [loss for loss, _ in found] == pytest.approx([wanted] * 2, rel=1e-5)
    assert set(divided) == {SAMPLES // 8}


def annotated():
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    initializer = flax.linen.initializers.lecun_normal()
    linen = flax.linen.Dense(
        64, kernel_init=flax.linen.with_partitioning(initializer, ("embed", "mlp"))
    )
    boxed = linen.init(jax.random.key(0), jnp.ones((2, 32)))["params"]
    value = np.ones((32, 64), np.float32)
    with nnx.use_eager_sharding(False):
        state = nnx.State({"named": nnx.Param(value, out_sharding=("embed", "mlp"))})
        state["plain"] = nnx.Param(value)
        state["axes"] = nnx.Param(value, out_sharding=(None, ("fsdp", "tensor")))
    rules = (("embed", "tensor"), ("mlp", "fsdp"))
    found = [
        fj.sharding_table(fj.shard_fsdp(boxed, mesh=mesh, rules=rules))[1][2],
        *(spec for *_, spec in fj.sharding_table(fj.shard_fsdp(state, mesh=mesh, rules=rules))),
    ]
    said = []
    for wrong in ({"embed": "fsdp"}, {"embed": ("fsdp", "tensor"), "mlp": "nowhere"}):
        try:
            fj.shard_fsdp(state, mesh=mesh, rules=wrong)
        except (ConfigError, KeyError) as error:
            said.append(f"{type(error).__name__} {error}")
    return [tuple(spec) for spec in found], said


def test_annotations_of_logical_axes_define_the_sharding(devices):
    (boxed, axes, named, plain), said = devices(annotated)
    assert boxed == named == ("tensor", "fsdp")
    assert axes == (None, ("fsdp", "tensor"))
    assert plain == ("tensor", "fsdp")  # by size: the larger dimension is sharded over fsdp
    assert said[0].startswith("ConfigError rules: expected one for 'mlp', an axis of named")
    assert said[1].startswith("ConfigError rules: expected axes of the mesh")


def through_orbax(folder):
    """Whether padded and stacked arrays in orbax's folders are equal on another mesh."""
    draw = np.random.default_rng(0)
    tx = optax.GradientTransformation(lambda params: {"copy": params}, lambda *given: given[:2])
    tree = {"b": draw.normal(size=7), "layers": {"w": draw.normal(size=(2, 257, 259))}}
    tree["b"] = jax.numpy.asarray(tree["b"], "bfloat16")

    def plan_on(num_devices):
        mesh = fj.make_mesh(1, num_devices, devices=jax.devices()[:num_devices])
        return fj.plan(tree, {"master_dtype": "float64"}, mesh, blocks=["layers"])

    def is_tree(params):
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(tree), strict=True)
        return all((np.asarray(a, float) == np.asarray(b, float)).all() for a, b in pairs)

    state, found = fj.shard(plan_on(8), tree, tx), []
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "tree", tree)
        checkpointer.save(folder / "whole", {"params": fj.full_params(state), "step": 3})
        checkpointer.save(folder / "state", state)
        checkpointer.wait_until_finished()
        for num_devices in (3, 8):
            like = fj.shard(plan_on(num_devices), jax.tree.map(np.zeros_like, tree), tx)
            restored = checkpointer.restore(folder / "state", like, strict=False)
            found.append(restored)
            found.append(dataclasses.replace(restored, params=restored.opt_state["copy"]))
            found.append(fj.load(plan_on(num_devices), folder / "tree", tx))
            found.append(fj.load(plan_on(num_devices), folder / "whole"))
    with open_source(folder / "tree") as source:
        read = {name: entry.read() for name, entry in source.tensors.items()}
    same = [is_tree(fj.full_params(one)) for one in found]
    same.append((read["layers.w"].numpy() == tree["layers"]["w"]).all())
    return same, str(read["b"].dtype), read["b"].tolist() == tree["b"].tolist()


def test_orbax_keeps_padded_arrays_from_one_mesh_to_another(devices, tmp_path):
    same, dtype, equal = devices(through_orbax, tmp_path)
    assert all(same), same
    assert dtype == "torch.bfloat16"
    assert equal


def saved_and_loaded(folder):
    """Losses of two steps after a save, and after a load on another mesh."""
    ids = np.random.default_rng(0).integers(0, 50, (SAMPLES, 6))
    batch = {"input_ids": ids, "label": ids[:, 0] % CLASSES}

    def made(shape, names, seed):
        rngs = nnx.Rngs(seed)
        graph, params = nnx.split(
            nnx.Sequential(
                nnx.Embed(50, 17, rngs=rngs),
                lambda x: x.mean(1),
                nnx.Dropout(0.1, rngs=rngs),
                nnx.BatchNorm(17, rngs=rngs),
                nnx.Linear(17, CLASSES, rngs=rngs),
            )
        )
        mesh = jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))
        params = fj.shard_fsdp(params, threshold=100, mesh=mesh)
        state = nnx.ModelAndOptimizer(nnx.merge(graph, params), optax.adam(1e-2))
        return state, fj.create_fsdp_train_step(mesh)

    def losses(state, step):
        found = []
        for _ in range(2):
            state, loss, _ = step(state, batch)
            found.append(float(loss))
        return found

    state, step = made((8,), ("fsdp",), 0)
    losses(state, step)
    fj.save(folder, nnx.state(state), step=2)
    straight = losses(state, step)
    state, step = made((2, 4), ("data", "fsdp"), 1)
    state, *_ = step(state, batch)
    before = fj.sharding_table(nnx.state(state))
    nnx.update(state, fj.load(nnx.state(state), folder))
    return straight, losses(state, step), before == fj.sharding_table(nnx.state(state))


def said_of_trees(folder):
    def said(tree):
        try:
            fj.save(folder, tree)
        except ConfigError as error:
            return str(error).partition(":")[0]
        return fj.load(tree, folder)

    with jax.enable_x64(False):
        twice, kept = {"a.b": jnp.ones(2), "a": {"b": jnp.zeros(2)}}, {"seen": np.int64(7)}
        large, exact = {"seen": np.int64(2**40 + 3)}, {"x": np.array([1 / 3])}
        return said(twice), said(large), said(exact), int(said(kept)["seen"])


def test_no_leaf_of_a_saved_tree_is_lost_or_rounded(devices, tmp_path):
    assert devices(said_of_trees, tmp_path) == ("a.b", "seen", "x", 7)


def test_a_state_of_nnx_is_saved_and_loaded_on_another_mesh(devices, tmp_path):
    straight, resumed, in_place = devices(saved_and_loaded, tmp_path)
    assert resumed == pytest.approx(straight, rel=1e-5)  # including the keys of dropout
    assert in_place


def in_network_order():
    """Devices of a mesh on a slice that lists them in a different order than its network."""

    @dataclass(frozen=True)
    class Chip:
        id: int
        coords: tuple[int, int, int]
        core_on_chip: int = 0
        process_index: int = 0
        platform: str = "tpu"
        device_kind: str = "TPU v4"
        slice_index: int = 0

    chips = [Chip(i, (i % 4, i // 4, 0)) for i in range(8)]
    placed = fj.make_mesh(2, 4, devices=chips[::2] + chips[1::2]).devices
    others = [replace(chip, slice_index=1, process_index=1) for chip in chips]
    apart = fj.make_mesh(2, 4, tensor=2, devices=others + chips).devices
    slices = [{device.slice_index for device in row.flat} for row in apart]
    return [[device.coords for device in row] for row in placed], slices


def test_meshes_of_tpus_follow_their_network(devices):
    rows, slices = devices(in_network_order)
    assert slices == [{0}, {1}]  # only the replicate axis crosses the slower network
    for row in rows:  # neighbours in a shard group are neighbours on the wire
        steps = [
            sum(abs(x - y) for x, y in zip(a, b, strict=True)) for a, b in itertools.pairwise(row)
        ]
        assert steps == [1, 1, 1]


def apart():
    mesh, plain = jax.make_mesh((8,), ("fsdp",)), fj.make_mesh(shard=8)
    launch = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in launch.items():
            patch.setenv(name, value)
        for call in (lambda: fj.shard_fsdp({}, mesh=mesh), lambda: fj.plan({}, mesh=plain)):
            with pytest.raises(ConfigError, match=r"2 ranks of torchrun, got 1; each would train"):
                call()


def test_a_process_that_jax_did_not_connect_is_refused(devices):
    devices(apart)
