"""FSDP1 under torch.distributed.checkpoint.state_dict, as in PyTorch's checkpoint recipes."""

import copy
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor

import fullshard as fs
from fullshard.compat import MisuseError
from fullshard.compat.fsdp1 import FullyShardedDataParallel as FSDP
from fullshard.compat.fsdp1 import always_wrap_policy
from fullshard.compat.fsdp2 import fully_shard
from fullshard.errors import EngineError
from support.ranks import on_ranks


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(16, 16)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(16, 9)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


class AppState(Stateful):
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optim = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state_dict):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


def make(seed=0, **settings):
    torch.manual_seed(seed)
    model = FSDP(ToyModel(), **settings)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def step(model, optimizer):
    optimizer.zero_grad()
    x = torch.linspace(-1, 1 + dist.get_rank(), 16 * 4).view(4, 16)
    model(x).square().sum().backward()
    optimizer.step()
    return model.net2.weight.full_tensor()


def save(app, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning of torch about pickles in its own files
        dcp.save({"app": app}, checkpoint_id=folder)


def load(state, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=folder)


def recipe(folder):
    model, optimizer = make(auto_wrap_policy=always_wrap_policy)
    step(model, optimizer)
    app = AppState(model, optimizer)
    state = app.state_dict()
    assert list(state["model"]) == ["net1.weight", "net1.bias", "net2.weight", "net2.bias"]
    moment = state["optim"]["state"]["net2.weight"]["exp_avg"]
    for rows in (state["model"]["net2.weight"], moment):
        assert isinstance(rows, DTensor)
        assert rows.to_local().shape == (5 - dist.get_rank(), 16)
    save(app, folder)
    other, twin = make(1)  # one unit, before its first forward
    load({"app": AppState(other, twin)}, folder)
    assert torch.equal(step(other, twin), step(model, optimizer))
    plain = ToyModel()  # the recipe's last part: without FSDP, in one process
    whole = {"app": {"model": plain.state_dict()}}
    load(whole, folder)
    plain.load_state_dict(whole["app"]["model"])
    assert torch.equal(plain.net1.weight, state["model"]["net1.weight"].full_tensor())


def test_the_recipe_for_distributed_checkpoints(ranks, tmp_path):
    ranks(2)(recipe, str(tmp_path / "dcp"))


@on_ranks(2)
def test_the_recipe_for_asynchronous_checkpoints(tmp_path):
    """Training continues; the checkpoint has the values from before."""
    folder = str(tmp_path)
    for wrap in (FSDP, fully_shard):
        torch.manual_seed(0)
        model = ToyModel()
        if wrap is fully_shard:  # of several units
            fully_shard(model.net1)
        model = wrap(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        future, name = None, f"{folder}/{wrap.__name__}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning of torch
            for number in range(2):
                wanted = step(model, optimizer)
                if future is not None:
                    future.result()
                app = AppState(model, optimizer)
                future = dcp.async_save({"app": app}, checkpoint_id=f"{name}_{number}")
            after = step(model, optimizer)
            future.result()
        other = wrap(ToyModel())
        twin = torch.optim.Adam(other.parameters(), lr=0.1)
        load({"app": AppState(other, twin)}, f"{name}_1")
        assert torch.equal(other.net2.weight.full_tensor(), wanted)
        assert torch.equal(step(other, twin), after)


def whole():
    """Checks full state dicts, and each of the calls before a model has run."""
    model, optimizer = make()
    fresh = get_optimizer_state_dict(model, optimizer)
    assert isinstance(fresh["state"]["net1.weight"]["exp_avg"], DTensor)
    wanted = step(model, optimizer)
    assert type(model.state_dict()["net2.weight"]) is torch.Tensor  # no other rank calls it
    assert not isinstance(optimizer.state_dict()["state"][0]["exp_avg"], DTensor)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    states = get_model_state_dict(model, options=options)
    moments = get_optimizer_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        assert torch.equal(states["net2.weight"], wanted)
        assert moments["state"]["net2.weight"]["exp_avg"].shape == (9, 16)
    else:
        assert states == moments == {}
    wanted = step(model, optimizer)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for seed in (1, 2):
        other, twin = make(seed, auto_wrap_policy=always_wrap_policy if seed == 1 else None)
        set_model_state_dict(other, dict(states), options=options)
        set_optimizer_state_dict(other, twin, dict(moments), options=options)
        assert torch.equal(step(other, twin), wanted)


def test_full_state_dicts_of_an_fsdp1_model(ranks):
    ranks(2)(whole)


# ---- state dicts that are kept


def kept_run(**settings):
    """Returns an FSDP2 model that stepped after its state dict was taken."""
    torch.manual_seed(0)
    model = ToyModel()
    fully_shard(model.net1)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **settings)
    state = model.state_dict()
    step(model, optimizer)
    return model, optimizer, state


@pytest.mark.short(1)
@pytest.mark.parametrize("kernel", ["foreach", "fused"])  # fused changes no version counter
@on_ranks(2)
def test_a_kept_state_dict_follows_the_weights_as_torchs_do(tmp_path, kernel):
    folder = tmp_path
    model, optimizer, state = kept_run(**{kernel: True})
    before = {name: value.full_tensor() for name, value in state.items()}
    step(model, optimizer)
    pickled, copied = pickle.loads(pickle.dumps(state)), copy.deepcopy(state)
    dcp.save({"model": state}, checkpoint_id=folder / "kept")
    wanted = {name: param.full_tensor() for name, param in model.named_parameters()}
    step(model, optimizer)
    dcp.async_save({"model": state}, checkpoint_id=folder / "async").result()
    later = {name: param.full_tensor() for name, param in model.named_parameters()}
    for name, value in wanted.items():
        assert not torch.equal(before[name], value)
        assert torch.equal(pickled[name].full_tensor(), value)
        assert torch.equal(copied[name].full_tensor(), value)
        assert type(pickled[name]) is type(copied[name]) is DTensor
    for saved, values in (("kept", wanted), ("async", later)):
        read = {name: torch.zeros_like(value) for name, value in before.items()}
        dcp.load({"model": read}, checkpoint_id=folder / saved)
        torch.testing.assert_close(read, values, rtol=0, atol=0)

    # a checkpoint is read into the state dict and loaded; the state dict follows one more step
    dcp.load({"model": state}, checkpoint_id=folder / "kept")
    model.load_state_dict(state)
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), wanted[name]), name
    step(model, optimizer)
    for name, param in model.named_parameters():
        assert torch.equal(state[name].full_tensor(), param.full_tensor()), name

    # the next state dict shares memory, as in torch, even if a hook dropped an entry of the last:
    # torchtitan 0.3 compares addresses
    step(model, optimizer)
    state.pop("net1.bias")
    again = model.state_dict()
    for name, value in state.items():
        assert again[name].to_local().data_ptr() == value.to_local().data_ptr(), name
    for name, param in model.named_parameters():
        assert torch.equal(again[name].full_tensor(), param.full_tensor()), name


def start(shard, seed=0):
    torch.manual_seed(seed)
    model = ToyModel()
    shard(model.net1)
    shard(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def read_and_dropped(shard, folder):
    """Reads a checkpoint into a state dict and drops it without `load_state_dict`."""
    model, optimizer = start(shard, seed=1)
    load({"model": model.state_dict()}, folder)
    yield model
    step(model, optimizer)
    yield model


def resumed(shard, folder):
    """`set_state_dict` steps a new optimizer with lr 0 before it loads weights."""
    model, optimizer = start(shard, seed=1)
    weights, states = get_state_dict(model, optimizer)
    load({"model": weights}, folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    step(model, optimizer)
    yield model


def changed_in_place(shard, _):
    model, optimizer = start(shard)
    state = model.state_dict()
    step(model, optimizer)
    for value in state.values():
        value.mul_(0.5)
        value.data.add_(0.1)
    yield model
    step(model, optimizer)
    torch._foreach_zero_([state["net2.weight"]])  # torch 2.11 does not report this write
    step(model, optimizer)
    average = [value.clone() for value in state.values()]
    torch._foreach_lerp_(average, [*state.values()], 0.5)  # it only reads the state dict
    with torch.no_grad():
        model.net1.weight.mul_(2)
    yield model


def written_on_one_rank(shard, _):
    """One rank writes the second of two state dicts; a copy of the first is loaded."""
    model, optimizer = start(shard)
    state, part = model.state_dict(), model.net1.state_dict()
    if dist.get_rank() == 0:
        part["weight"].to_local().fill_(0.5)
    state["net2.weight"].mul_(2)
    model.load_state_dict({"net2.weight": state["net2.weight"].clone()}, strict=False)
    yield model
    step(model, optimizer)
    yield model


def read_inside_unshard(shard, _):
    """Writes into the gathered parameters are dropped while a kept state dict is read."""
    model, _ = start(shard)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer)
    kept = [model.state_dict()["net2.bias"], optimizer.state_dict()["state"][3]["exp_avg"]]
    step(model, optimizer)
    model.unshard()
    with torch.no_grad():
        model.net2.bias.zero_()
    shown = nn.Module()
    for name, value in zip(("weight", "moment"), kept, strict=True):
        shown.register_buffer(name, value.full_tensor())
    model.reshard()
    kept[0].mul_(2)
    yield shown
    yield model


def views_that_are_kept(shard, folder):
    """One rank writes views of a dropped state dict after a forward; rows are read late."""
    model, optimizer = start(shard)
    views = [value.to_local() for value in model.state_dict().values()]
    rows = model.state_dict()["net2.bias"]
    with torch.no_grad():
        model(torch.ones(1, 16))
        if dist.get_rank() == 1:
            torch._foreach_mul_(views, 0.5)
    yield model
    del views
    step(model, optimizer)
    state = model.net2.state_dict()
    with torch.no_grad():
        model(torch.ones(1, 16))
    state["weight"].mul_(0.5)
    del state  # written after the forward
    yield model
    step(model, optimizer)
    load({"model": {"net2.bias": rows}}, folder)
    yield model


def whole_of(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def read_beside_another(shard, _):
    """Writes one of two kept state dicts after a step."""
    model, optimizer = start(shard)
    state, part = model.state_dict(), model.net1.state_dict()
    step(model, optimizer)
    state["net1.weight"].mul_(2)
    shown = nn.Module()
    shown.register_buffer("weight", part["weight"].full_tensor())
    state["net1.weight"].mul_(2)
    shown.register_buffer("norm", model.net1.weight.norm().detach())
    state["net1.weight"].mul_(2)
    shown.register_buffer("sum", model.net1.weight.sum().detach())
    state["net1.weight"].mul_(2)
    shown.register_buffer("whole", model.net1.weight.full_tensor().detach())
    shown.register_buffer("again", part["weight"].full_tensor())  # read since the last step
    yield shown


@on_ranks(3)  # a rank's rows of net1 and net2 differ from its shard
def test_writing_a_state_dict_writes_the_weights_as_in_torch(tmp_path):
    model, optimizer = start(fully_shard, seed=2)
    step(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model}, checkpoint_id=tmp_path)
    for case in (
        read_and_dropped,
        resumed,
        changed_in_place,
        written_on_one_rank,
        read_beside_another,
        read_inside_unshard,
        views_that_are_kept,
    ):
        ours, torchs = case(fully_shard, tmp_path), case(torchs_fully_shard, tmp_path)
        for one, other in zip(ours, torchs, strict=True):
            for (name, row), wanted in zip(
                one.state_dict().items(), other.state_dict().values(), strict=True
            ):
                torch.testing.assert_close(whole_of(row), whole_of(wanted), msg=name)


@on_ranks(2)
def test_writing_both_a_state_dict_and_its_weights_is_an_error():
    model, _, state = kept_run()
    weight, rows = model.net1.weight, state["net1.weight"].to_local()
    with torch.no_grad():
        old = weight.data
        rows.zero_()
        for use in (weight.to_local, lambda: weight + 1, lambda: old + 1, lambda: weight.mul_(2)):
            with pytest.raises(MisuseError, match=r"before (to_local|add|mul_) of this rank"):
                use()
        assert not weight.full_tensor().any()  # this call loads the written rows
        weight.add_(2)
    rows.fill_(3)
    for read in (state["net1.weight"].full_tensor, model.state_dict):
        with pytest.raises(MisuseError, match="it was not called before the weights changed"):
            read()


def states_of(model, optimizer, kept):
    """Reads a kept state dict after a step, and writes it before the next step."""
    step(model, optimizer)
    yield from (value for entry in kept.values() for value in entry.values())
    for entry in kept.values():
        entry["exp_avg"].mul_(0.5)
        entry["step"].add_(1)
    step(model, optimizer)
    yield from optimizer.state_dict()["state"][0].values()
    optimizer.load_state_dict(optimizer.state_dict())  # the kept states still follow it
    step(model, optimizer)
    for entry in kept.values():
        yield from entry.values()
        entry["exp_avg"].mul_(0.5)
    step(model, optimizer)
    yield from optimizer.state_dict()["state"][0].values()
    model.net1.bias.requires_grad_(True)  # ours is sharded again
    step(model, optimizer)
    yield from (value for entry in kept.values() for value in entry.values())


@pytest.mark.parametrize("kernel", ["foreach", "fused"])
@pytest.mark.parametrize("by_torch", [True, False])
@on_ranks(3)
def test_a_kept_state_dict_of_an_optimizer_aliases_its_states_as_in_torch(kernel, by_torch):
    found = []
    for shard in (fully_shard, torchs_fully_shard):
        model, _ = start(shard)
        model.net1.bias.requires_grad_(False)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, **{kernel: True})
        step(model, optimizer)
        states = (
            get_optimizer_state_dict(model, optimizer) if by_torch else optimizer.state_dict()
        )["state"]
        values = states_of(model, optimizer, states)
        found.append([v.full_tensor() if isinstance(v, DTensor) else v for v in values])
    for ours, torchs in zip(*found, strict=True):
        torch.testing.assert_close(ours, torchs)


@on_ranks(2)
def test_a_second_model_does_not_follow_rows_assigned_to_it():
    model, optimizer, state = kept_run()
    other = ToyModel()
    other.load_state_dict(state, assign=True)
    before = {name: param.full_tensor().detach() for name, param in other.named_parameters()}
    step(model, optimizer)
    with torch.no_grad():
        other.net1.weight.mul_(2.0)
    for name, param in other.named_parameters():
        assert torch.equal(param.full_tensor(), before[name] * (1 + (name == "net1.weight"))), name
    for name, param in model.named_parameters():
        assert torch.equal(state[name].full_tensor(), param.full_tensor()), name
        assert not state[name].requires_grad


@on_ranks(2)
def test_a_thread_reads_rows_only_while_they_are_up_to_date():
    _, _, state = kept_run()
    read = state["net1.weight"].to_local
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(MisuseError, match="in a thread other than the one that trains"):
            pool.submit(read).result()
        assert torch.equal(read(), pool.submit(read).result())


@on_ranks(2)
def test_reading_rows_on_one_rank_after_a_step_is_refused_on_all():
    model, _, state = kept_run()
    asks = (
        state["net1.weight"].to_local if dist.get_rank() == 0 else lambda: model(torch.ones(1, 16))
    )
    with pytest.raises(EngineError, match="expected the same call on every rank"):
        asks()


class Fused(nn.Module):
    """Like torchtitan's attention: one weight, saved and loaded as two."""

    def __init__(self):
        super().__init__()
        self.both = nn.Linear(8, 8)
        self.both.register_state_dict_post_hook(self.split)
        self.both.register_load_state_dict_pre_hook(self.join)

    def forward(self, x):
        return self.both(x)

    @staticmethod
    def split(module, state, prefix, _):
        weight = state.pop(f"{prefix}weight")
        state[f"{prefix}a"], state[f"{prefix}b"] = weight.reshape(4, 2, 8).unbind(1)

    @staticmethod
    def join(module, state, prefix, *_):
        parts = [state.pop(f"{prefix}{name}") for name in "ab"]
        state[f"{prefix}weight"] = torch.stack(parts, 1).reshape(8, 8)


@on_ranks(2)
def test_hooks_of_a_state_dict_see_the_same_values_as_in_torch():
    torch.manual_seed(0)
    model, whole = Fused(), Fused()
    whole.load_state_dict(model.state_dict())
    fully_shard(model)
    state = model.state_dict()
    assert state.keys() == whole.state_dict().keys()
    for name, value in whole.state_dict().items():
        assert isinstance(state[name], DTensor)
        assert torch.equal(state[name].full_tensor(), value), name
    assert isinstance(model.both.weight, nn.Parameter)
    doubled = {name: value.full_tensor() * 2 for name, value in state.items()}
    model.load_state_dict(doubled)
    assert torch.equal(model.both.weight.full_tensor(), whole.both.weight * 2)


@pytest.mark.parametrize("facade", ["fsdp1", "fsdp2"])
@on_ranks(2)
def test_a_pre_hook_writes_before_the_values_are_taken(facade):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    params = dict(model.named_parameters()) if facade == "fsdp2" else {}
    model = fully_shard(model) if facade == "fsdp2" else FSDP(model)
    params = params or dict(model.named_parameters())

    def swap(*_):
        with torch.no_grad():
            for param in model.parameters():
                param.data.zero_()

    model(torch.ones(1, 4)).sum().backward()
    model.register_state_dict_pre_hook(swap)
    with torch.inference_mode():  # an evaluation inside which the model is saved
        state = model.state_dict()
    assert len(state) == len(params) == 4
    for value in state.values():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        assert not whole.any()


@pytest.mark.parametrize("facade", [fully_shard, FSDP])
@on_ranks(2)
def test_states_before_the_first_step_are_whole(facade):
    model = facade(ToyModel())
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    whole = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True)
    )
    if dist.get_rank() == 0:
        assert torch.equal(whole["state"]["net1.weight"]["sum"], torch.full((16, 16), 0.5))
    rows = get_optimizer_state_dict(model, optimizer)["state"]["net2.weight"]["sum"]
    assert rows.to_local().shape == (5 - dist.get_rank(), 16)


@on_ranks(2)
def test_a_model_may_contain_a_script_module():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit.script is deprecated
        model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.ReLU()))
    state = fully_shard(model).state_dict()
    assert list(state) == ["0.weight", "0.bias"]


@on_ranks(3)  # the last rank has no row of these weights
def test_a_checkpoint_is_read_into_rows_that_are_long_kept(tmp_path):
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 5)))
    state = model.state_dict()
    wanted = {name: value.full_tensor() for name, value in state.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=tmp_path)
    model(torch.ones(1, 5)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    load(state, tmp_path)
    whole = fs.full_state_dict(model, rank0_only=False)
    torch.testing.assert_close(whole, wanted)


@pytest.mark.parametrize("facade", [True, False])
@on_ranks(2)
def test_a_norm_on_one_rank_with_new_rows_is_refused_on_all(facade):
    torch.manual_seed(0)
    model, native = fully_shard(ToyModel()), fs.shard(ToyModel())
    state = model.state_dict()
    read = model if facade else native
    asks = read.net1.weight.norm if dist.get_rank() == 0 else lambda: read(torch.ones(1, 16))
    with pytest.raises(EngineError, match="All ranks must make the same calls"):
        asks()
    assert len(state) == 4
