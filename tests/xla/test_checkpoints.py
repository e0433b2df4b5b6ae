"""Both engines share one checkpoint format: no bit changes from torch to jax and back."""

import threading
from collections import Counter
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

import fullshard as fs
from fullshard.checkpoint.read import Checkpoint
from fullshard.errors import CheckpointError, ConfigError
from fullshard.saving import SAVES, SaveSettings
from support import decoders
from support.lazy import fj, fx, fxs, jax, jnp, optax, orbax
from support.other_axes import mesh_of

NUM_STEPS = 2


def sharded(model, tensor, expert=1):
    """Returns the sharded model; with `tensor` > 1, an axis under transformers' own plan."""
    if tensor == 1:
        return fs.shard(model, expert=expert)

    mesh = mesh_of(1, dist.get_world_size() // tensor, tensor)
    apply_tensor_parallelism(model, mesh["tensor"], model._expand_parallel_plan(model.tp_plan))
    return fs.shard(model, mesh=mesh["shard"])


def train_in_torch(folder, config_folder, name, tensor, expert):
    """Runs some steps of AdamW in float32 and saves."""
    config = decoders.config_of(name, tie_word_embeddings=tensor == 1)
    config.save_pretrained(config_folder)
    model = sharded(decoders.build(config).float(), tensor, expert)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(NUM_STEPS):
        ids = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(step))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    fs.save(folder, model, optimizer, step=NUM_STEPS)


def load_in_torch(folder, config_folder, tensor, expert=1):
    """Returns full parameters and states of a checkpoint, as torch's engine reads them."""
    config = AutoConfig.from_pretrained(config_folder)
    model = sharded(decoders.build(config, seed=1).float(), tensor, expert)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = fs.load(folder, model, optimizer)["step"]
    found = {
        name: value.numpy() for name, value in fs.full_state_dict(model, rank0_only=False).items()
    }
    for name, param in model.named_parameters():
        for word in ("exp_avg", "exp_avg_sq"):
            found[f"{name}/{word}"] = optimizer.state[param][word].full_tensor().numpy()
        assert float(optimizer.state[param]["step"]) == NUM_STEPS
    return step, found


def through_jax(source, target, config_folder, meshes):
    """Loads on one mesh and saves, then loads that on the next, and so on."""
    config = fx.decoder.DecoderConfig.of(AutoConfig.from_pretrained(config_folder))
    tx = optax.scale_by_adam()
    for at, (replicate, shard, tensor, expert) in enumerate(meshes):
        devices = jax.devices()[: replicate * shard * expert * tensor]
        mesh = fj.make_mesh(replicate, shard, expert=expert, tensor=tensor, devices=devices)
        plan = fx.decoder.planned(config.shapes(), None, mesh)
        state, beside = fxs.load(plan, source, tx)
        assert int(state.step) == NUM_STEPS
        assert int(state.opt_state.count) == NUM_STEPS
        source = fxs.save(target / str(at), state, SaveSettings(step=NUM_STEPS), beside)
    return str(source)


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_ranks", "name", "tensor", "expert"),
    [
        pytest.param(2, "qwen3", 1, 1, marks=pytest.mark.long),
        (4, "qwen3", 2, 1),
        (4, "qwen3_moe", 1, 2),
    ],
)
def test_no_bit_changes_from_torch_to_jax_to_torch(
    ranks, devices, tmp_path, num_ranks, name, tensor, expert
):
    config = tmp_path / "config"
    ranks(num_ranks)(train_in_torch, tmp_path / "torch", config, name, tensor, expert)
    meshes = [(1, 8, 1, 1), (1, 3, 2, 1), (2, 2, 2, 1), (1, 3, 1, 1), (1, 1, 2, 1), (1, 1, 1, 1)]
    if expert > 1:
        meshes = [(1, 2, 1, 4), (1, 3, 1, 2), (2, 1, 2, 2), (1, 1, 1, 8), (1, 1, 1, 1)]
    last = devices(through_jax, tmp_path / "torch", tmp_path / "jax", config, meshes)
    wanted = ranks(num_ranks)(load_in_torch, tmp_path / "torch", config, tensor, expert)
    want_step, wanted = wanted[0]
    readers = ranks(3)(load_in_torch, last, config, 1)
    readers += ranks(4)(load_in_torch, last, config, 2) if tensor > 1 else []
    for step, found in readers:
        assert step == want_step == NUM_STEPS
        assert found.keys() == wanted.keys()
        assert all(found[name].tobytes() == wanted[name].tobytes() for name in wanted)


NAMES = {"head.bias": (8,), "head.weight": (8, 24), "layers.0.weight": (24, 24), "scale": ()}


def written_by_orbax(folder):
    """Writes the arrays of a tree by dotted path into orbax's folders `plain`, `whole`, `other`."""
    draw = np.random.default_rng(0)
    flat = {name: draw.normal(size=shape).astype(np.float32) for name, shape in NAMES.items()}
    flat["head.weight"] = flat["head.weight"].astype(jax.numpy.bfloat16)
    tree = {
        "head": {},
        "layers": {"0": {"weight": flat["layers.0.weight"]}},
        "scale": flat["scale"],
    }
    tree["head"] = {"bias": flat["head.bias"], "weight": flat["head.weight"]}
    whole = {"opt_state": {"count": np.int32(3)}, "params": tree, "step": 3}
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        for name, written in (("plain", tree), ("whole", whole), ("other", {"head": tree["head"]})):
            checkpointer.save(folder / name, jax.tree.map(jax.numpy.asarray, written))
        small = jax.numpy.zeros((4, 4), jax.numpy.int4)
        checkpointer.save(folder / "int4", {"head": {"weight": small}})
    return {name: value.astype(np.float32) for name, value in flat.items()}


def loaded_of_orbax(folder, config):
    """Returns full weights that fs.load reads from the two folders, and errors of mistakes."""
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.Linear(24, 24, bias=False)])
    model.head, model.scale = torch.nn.Linear(24, 8), torch.nn.Parameter(torch.zeros(()))
    fs.shard(model, fs.ShardConfig(wrap="none", **config))
    optimizer = torch.optim.AdamW(model.parameters())
    found, said = [], []
    for name in ("plain", "whole"):
        for param in model.parameters():
            param.data.zero_()
        assert fs.load(folder / name, model) == {"step": None}
        state = fs.full_state_dict(model, rank0_only=False)
        found.append({name: value.numpy() for name, value in state.items()})
    for mistake in (("plain", optimizer), ("other",), ("int4",)):
        try:
            fs.load(folder / mistake[0], model, *mistake[1:])
        except CheckpointError as error:
            said.append(str(error).replace(str(folder), ""))
    return found, said


@pytest.mark.parametrize("config", [{}, {"strategy": "no_shard"}])
def test_a_torch_model_loads_a_tree_written_by_orbax(ranks, devices, tmp_path, config):
    wanted = devices(written_by_orbax, tmp_path)
    for found, said in ranks(2)(loaded_of_orbax, tmp_path, config):
        for state in found:
            assert state.keys() == wanted.keys()
            assert all((state[name] == wanted[name]).all() for name in wanted)
        assert said[0].startswith("checkpoint '/plain': expected the states of AdamW")
        assert said[1].startswith(
            "checkpoint '/other': expected scale of shape (); the checkpoint has no"
        )
        assert said[2].startswith("model/head.weight: expected a dtype among torch.float64")
        assert "got torch.int4" in said[2] or "got int4" in said[2]


def bytes_read(folder):
    """Returns the bytes that eight devices read of each array."""
    shapes = {"tall": jnp.ones((64, 8), jnp.float32), "wide": jnp.ones((8, 64), jnp.float32)}
    plan = fj.plan(shapes, None, fj.make_mesh(1, 8))
    fj.save(folder, fj.init(plan, lambda _: shapes))
    found, read = Counter(), Checkpoint.read

    def counted(self, key, start, stop, out):
        found[key] += out.nbytes
        read(self, key, start, stop, out)

    with patch.object(Checkpoint, "read", counted):
        fj.load(plan, folder)
    return dict(found)


def test_a_device_reads_only_the_bytes_of_its_box(devices, tmp_path):
    found = devices(bytes_read, tmp_path / "checkpoint")
    assert found == {"model/tall": 8 * 256, "model/wide": 8 * 256}


def kinds_saved(folder):
    """Returns torch classes under which optimizers are saved, and errors of mismatched loads."""
    plan, kinds = fj.plan({"w": jnp.ones(8)}), {}
    rules = ("adamax", "adabelief", "yogi", "radam", "nadamw", "lamb", "novograd")
    injected = {
        f"injected {name}": optax.inject_hyperparams(getattr(optax, name)) for name in rules
    }
    named = {name: getattr(optax, name) for name in ("sgd", "lion", *rules, "adam")} | injected
    named |= {
        "momentum": partial(optax.sgd, momentum=0.9),
        "adamw": lambda rate: optax.chain(optax.clip_by_global_norm(1), optax.adamw(rate)),
        "injected adamw": optax.inject_hyperparams(optax.adamw),
        "scheduled": lambda rate: named["injected adamw"](lambda count: rate),
    }
    for name, make in named.items():
        found = fxs.states_of(fx.aot.abstract_state(plan, make(0.1)))
        kinds.setdefault(fxs.kind_of(*found), set()).add(name)
    for name in ("sgd", "adam", "yogi", "radam"):
        fj.save(folder / name, fj.shard(plan, {"w": jnp.ones(8)}, named[name](0.1)))
    fj.load(plan, folder / "sgd", optax.sgd(0.1))
    fj.load(plan, folder / "adam", optax.adamw(0.1))
    told = []
    for saved, loaded in (
        ("sgd", "adamw"),
        ("yogi", "adamax"),
        ("radam", "adam"),
        ("adam", "nadamw"),
    ):
        with pytest.raises(CheckpointError) as error:
            fj.load(plan, folder / saved, named[loaded](0.1))
        told.append(str(error.value).partition(": ")[2])
    state = fj.shard(plan, {"w": jnp.ones(8)}, optax.yogi(0.1))
    step = fj.train_step(plan, lambda params, _: (params["w"].sum(), 1), optax.adamax(0.1))
    with pytest.raises(ConfigError, match="expected the optimizer state of the step"):
        step(state, {"x": np.ones(8)})
    return kinds, told


def test_only_the_rules_of_adam_and_plain_sgd_have_the_names_of_torch(devices, tmp_path):
    kinds, told = devices(kinds_saved, tmp_path)
    assert kinds["SGD"] == {"sgd"}
    assert kinds["AdamW"] == {"adam", "adamw", "injected adamw", "scheduled"}
    nesterov = "(nesterov scale_by_adam, scale_by_adam, 0.mu, 0.nu)"
    assert [text.partition(". Load")[0].partition("optimizer ")[2] for text in told] == [
        "(scale_by_adam, exp_avg, exp_avg_sq); it has those of SGD",
        "(scale_by_adamax, 0.mu, 0.nu); it has those of optax, scale_by_yogi",
        "(scale_by_adam, exp_avg, exp_avg_sq); it has those of optax, scale_by_radam, 0.mu, 0.nu",
        f"{nesterov}; it has those of AdamW, scale_by_adam, exp_avg, exp_avg_sq",
    ]


def saved_with_amsgrad(folder):
    model = fs.shard(torch.nn.Linear(8, 4, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    fs.save(folder, model, optimizer)


def told_of(folder):
    plan = fj.plan({"weight": jnp.ones((4, 8))})
    fj.load(plan, folder)
    with pytest.raises(CheckpointError) as error:
        fj.load(plan, folder, optax.adamw(0.1))
    return str(error.value)


def test_a_state_of_torch_that_optax_lacks_is_refused_and_not_dropped(ranks, devices, tmp_path):
    ranks(2)(saved_with_amsgrad, tmp_path)
    assert "it has those of AdamW, max_exp_avg_sq. Load only" in devices(told_of, tmp_path)


def loaded_without_an_array(folder):
    saved = {"w": jnp.ones((4, 8)), "layers": {"b": jnp.ones((3, 8))}}
    fj.save(folder, fj.shard(fj.plan(saved, blocks=["layers"]), saved))
    told = []
    for fewer in ({"layers": saved["layers"]}, {**saved, "layers": {"b": jnp.ones((2, 8))}}):
        with pytest.raises(CheckpointError) as error:
            fj.load(fj.plan(fewer, blocks=["layers"]), folder)
        told.append(str(error.value).partition("it also has ")[2])
    return told


def test_a_checkpoint_with_more_arrays_or_layers_than_the_plan_is_refused(devices, tmp_path):
    told = devices(loaded_without_an_array, tmp_path)
    assert told == ["w. Plan the saved model.", "layers.2.b. Plan the saved model."]


def saved_with_counts(folder):
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(8))
    fs.save(folder, fs.shard(model))


def loaded_without_counts(folder):
    names = "weight", "bias", "running_mean", "running_var"
    tree = fj.load({"0": {name: jnp.full(8, 3.0) for name in names}}, folder)
    return [float(tree["0"][name][7]) for name in names]


def test_counts_of_batches_that_torch_saves_are_no_arrays_of_a_plan(devices, tmp_path):
    saved_with_counts(tmp_path)
    assert devices(loaded_without_counts, tmp_path) == [1, 0, 0, 1]


def what_awaits_a_save(folder):
    """Whether a save in progress had ended when the next save, and a load, returned."""
    plan, tx = fj.plan({"w": jnp.ones(8)}), optax.sgd(0.1)
    state, found = fj.shard(plan, {"w": jnp.ones(8)}, tx), []
    for act in (partial(fj.save, folder, state), partial(fj.load, plan, folder, tx)):
        act()  # the second call is quick
        goes_on, ended = threading.Event(), []
        SAVES.start(lambda go=goes_on, ended=ended: ended.append(go.wait(0.5)))
        act()
        found.append(bool(ended))
        goes_on.set()
    return found


def test_a_save_and_a_load_await_the_save_in_progress(devices, tmp_path):
    assert devices(what_awaits_a_save, tmp_path / "checkpoint") == [True, True]
