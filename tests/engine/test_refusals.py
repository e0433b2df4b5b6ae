"""Models that cannot be sharded and calls that are unsupported raise typed errors with a remedy."""

import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import fullshard as fs
from fullshard.errors import ConfigError, UnsupportedModelError
from support.parity import unlike_gradients
from support.ranks import on_ranks
from support.scripts import Run, Tiny, differences, error_of, tokens_of


def rank():
    return torch.distributed.get_rank()


def whole(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


# ---- models -----------------------------------------------------------------------------------


class Twin(nn.Linear):
    """All of them are equal."""

    def __eq__(self, _):
        return True

    def __hash__(self):
        return 0


class Quantized(nn.Parameter):
    """A parameter of a custom class."""


def with_a_scripted_part(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model.blocks[1] = torch.jit.script(nn.Linear(3, 3))


def put(path, make, **options):
    """Replaces a parameter by one made of the model."""

    def change(model):
        module, _, name = path.rpartition(".")
        setattr(model.get_submodule(module), name, nn.Parameter(make(model), **options))

    return change


MODELS: dict[str, Callable[[Any], Any]] = {
    "with_int8": put("codes", lambda _: torch.zeros(4, dtype=torch.int8), requires_grad=False),
    "with_complex": put("phase", lambda _: torch.zeros(4, dtype=torch.complex64)),
    "with_shared_storage": put("head.weight", lambda model: model.embed.weight.data),
    "with_overlapping_parameters": put("rows", lambda model: model.head.weight.data[1:]),
    "with_a_gradient": lambda model: model(tokens_of(0, 0)).sum().backward(),
    "with_a_gradient_hook": lambda model: model.head.weight.register_hook(lambda grad: grad * 2),
    "with_a_parameter_subclass": lambda model: setattr(
        model.head, "weight", Quantized(model.head.weight.data)
    ),
    "with_a_lazy_module": lambda model: setattr(model, "late", nn.LazyLinear(3)),
    "partly_on_meta": lambda model: setattr(
        model, "head", nn.Linear(10, 11, bias=False, device="meta")
    ),
    "with_a_sharded_part": lambda model: fs.shard(model.blocks[1]),
    "with_a_block_of_a_sharded_model": lambda model: fs.shard(nn.Sequential(model.blocks[0])),
    "sharded_already": fs.shard,
    "with_sparse": put("mask", lambda _: torch.eye(3).to_sparse(), requires_grad=False),
    "with_a_scripted_part": with_a_scripted_part,
    "with_equal_modules": lambda model: model.blocks.extend([Twin(10, 10), Twin(10, 10)]),
    "with_a_parent_as_a_child": lambda model: setattr(
        model.blocks[0], "parent", weakref.proxy(model)
    ),
}


def refused_models():
    """Returns the errors of fs.shard, which leaves the model unchanged."""
    texts = {}
    for name, change in MODELS.items():
        model = Tiny()
        change(model)
        before = [(type(param), _shape_of(param)) for param in model.parameters()]
        texts[name] = error_of(partial(fs.shard, model))
        assert [(type(param), _shape_of(param)) for param in model.parameters()] == before, name
    return texts


def _shape_of(param):
    return None if nn.parameter.is_lazy(param) else param.shape


def test_a_model_that_cannot_be_sharded_is_refused_and_left_as_it_was(ranks, snapshot):
    texts = ranks(2)(refused_models)
    assert texts[0] == texts[1]
    assert texts[0] == snapshot


CONFIGS: dict[str, dict[str, Any]] = {
    "unknown field": {"stratgy": "full_shard"},
    "unknown strategy": {"strategy": "fulll_shard"},
    "strategies": {"strategies": {"nowhere": "no_shard"}},
    "mesh too large": {"mesh": (1, 4)},
    "mesh and sizes": {"mesh": (1, 2), "shard": 2},
    "mesh of three axes": {"mesh": (1, 1, 2)},
    "offload": {"offload": {"parameters": "nvme"}},
    "shared transport": {"transport": "shared", "strategy": "no_shard"},
    "missing class": {"wrap": ["Blok"]},
    "sample of another kind": {"weights": "/nowhere"},
}


def test_an_object_that_is_no_module_is_refused():
    with pytest.raises(ConfigError, match=r"fs\.shard: expected a torch\.nn\.Module; got list"):
        fs.shard([nn.Linear(2, 2)])  # type: ignore[arg-type]


@on_ranks(2)
def test_an_impossible_configuration_is_refused_by_name():
    model = Tiny()
    texts = {n: error_of(partial(fs.shard, model, **config)) for n, config in CONFIGS.items()}
    assert all(type(param) is nn.Parameter for param in model.parameters())
    wrong = {n: t for n, t in texts.items() if not t.startswith(("Config", "WrapError"))}
    assert not wrong
    assert "Did you mean 'strategy'" in texts["unknown field"]
    assert "Block" in texts["missing class"]


# ---- changes behind our back ------------------------------------------------------------------


def data_replaced(model):
    for param in model.parameters():
        param.data = param.data * 0.9


def vector_to_parameters(model):
    vector = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    nn.utils.vector_to_parameters(vector, model.parameters())


BEHIND_OUR_BACK: dict[str, Callable[[Any], Any]] = {
    "to_half": lambda model: model.half(),
    "to_float": lambda model: model.to(torch.float32),
    "data_replaced": data_replaced,
    "vector_to_parameters": vector_to_parameters,
    "parameter_replaced": put(
        "blocks.1.up.weight", lambda _: torch.zeros(22, 10, dtype=torch.float64)
    ),
    "parameters_tied_later": lambda model: setattr(model.head, "weight", model.embed.weight),
    "frozen_part_trained": lambda model: model.blocks[0].requires_grad_(True),
}


def changed_models():
    texts = {}
    for name, change in BEHIND_OUR_BACK.items():
        run = Run(2, rank())
        model = run.model()
        model.blocks[0].requires_grad_(False)
        run.shard(model)
        run.loss(model, 0).backward()
        model.zero_grad()
        change(model)
        texts[name] = error_of(partial(run.loss, model, 1))
    return texts


def test_changes_of_shards_are_noticed_at_the_next_forward(ranks, snapshot):
    texts = ranks(2)(changed_models)
    assert not [t for found in texts for t in found.values() if not t.startswith("EngineError")]
    assert texts[0] == snapshot


@pytest.mark.parametrize("in_place", [True, False])
@on_ranks(2)
def test_a_whole_weight_that_was_transposed_is_noticed(in_place):
    run = Run(2, rank())
    model = run.shard(run.model(), strategy="no_shard")
    weight = model.blocks[0].mid.weight
    with torch.no_grad():
        if in_place:
            weight.t_()
        else:
            weight.data = weight.data.t()
    assert "blocks.0.mid.weight: expected its shard" in error_of(partial(run.loss, model, 0))


@on_ranks(2)
def test_changes_without_effect_and_writes_in_place_are_allowed():
    run = Run(2, rank())
    model, alone = run.shard(run.model()), run.model()
    for each in (model, alone):
        each.double().to("cpu").train().eval().train()
        each.to(torch.float64)
        each.requires_grad_(True)
        each.apply(lambda module: None)
        with torch.no_grad():
            for param in each.parameters():
                param.mul_(1.25)
                param.data.sub_(0.01)
            each.head.weight.data.zero_()
            nn.init.constant_(each.blocks[0].norm.weight, 0.5)
            nn.init.ones_(each.blocks[1].norm.weight)
    assert not list(differences(fs.full_state_dict(model, rank0_only=False), whole(alone), 1e-15))
    run.loss(model, 0).backward()


# ---- calls ------------------------------------------------------------------------------------


def refused_calls():
    """Each call is refused, and the next step is right."""
    run = Run(2, rank())
    model, alone = run.shard(run.model()), Run(2, None)
    reference = alone.model()
    state = {name: p.detach() * 2 for name, p in run.model().named_parameters()}
    tokens = tokens_of(0, rank())
    weight = model.blocks[0].mid.weight
    calls = {
        "create_graph": lambda: run.loss(model, 0).backward(create_graph=True),
        "autograd.grad": lambda: torch.autograd.grad(run.loss(model, 0), list(model.parameters())),
        "functional_call": lambda: torch.func.functional_call(model, state, (tokens,)),
        "register_hook": lambda: weight.register_hook(lambda g: g),
        "fs.sharding of a plain tensor": lambda: fs.sharding(torch.ones(3)),
        "fs.global_norm of plain tensors": lambda: fs.global_norm([torch.ones(3)]),
        "fs.memory_stats of a plain model": lambda: fs.memory_stats(reference),
        "fs.clip_grad_norm_ of a plain model": lambda: fs.clip_grad_norm_(reference, 1.0),
        "fs.no_sync of a plain model": lambda: fs.no_sync(reference),
        "fs.unsharded of a plain model": lambda: fs.unsharded(reference).__enter__(),
        "fs.full_state_dict of a plain model": lambda: fs.full_state_dict(reference),
        "fs.reset of a plain model": lambda: fs.reset(reference),
        "load_state_dict of {}": lambda: model.load_state_dict({}),
    }
    texts = {}
    for name, call in calls.items():
        texts[name] = error_of(call)
        model.zero_grad()
    run.loss(model, 1).backward()
    alone.loss(reference, 1).backward()
    assert unlike_gradients(model, reference) == []
    return texts


def test_a_refused_call_says_why_and_the_next_step_is_right(ranks, snapshot):
    texts = ranks(2)(refused_calls)[0]
    wrong = {name: t for name, t in texts.items() if t.startswith(("UNTYPED", "NO ERROR"))}
    assert not wrong
    assert texts == snapshot


def test_a_buffer_that_is_a_view_of_a_parameter_is_refused_by_name():
    model = Tiny()
    model.register_buffer("shadow", model.head.weight.data)
    with pytest.raises(UnsupportedModelError, match=r"shadow: .*shares that of 'head\.weight'"):
        fs.shard(model)


def test_an_attribute_that_is_a_view_of_a_parameter_is_named(caplog):
    model = Tiny()
    model.blocks[0].kept = [{"transposed": model.embed.weight.detach().t()}]
    nn.utils.spectral_norm(model.head)  # a hook computes the weight in each forward
    fs.shard(model)
    (record,) = caplog.records
    assert "blocks.0.kept shares the memory of embed.weight" in record.getMessage()


# ---- other tools around a sharded model -------------------------------------------------------


def other_tools(transport):
    """Each tool is refused, and the next step is right."""
    run = Run(2, rank())
    model = run.shard(run.model(), transport=transport)
    example = (tokens_of(0, rank()),)
    calls: dict[str, Callable[[], Any]] = {
        "trace": lambda: torch.jit.trace(model, example),
        "make_fx": lambda: make_fx(model)(*example),
        "export": lambda: torch.export.export(model, example),
        "ddp": lambda: nn.parallel.DistributedDataParallel(model),
        "share_memory": model.share_memory,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit
        texts = {name: error_of(call) for name, call in calls.items()}
    run.loss(model, 1).backward()
    model.zero_grad()
    model.float()  # also if a rank has no element of the first parameter
    texts["float"] = error_of(partial(run.loss, model, 2))
    return texts


@pytest.mark.parametrize("transport", ["shared", "direct"])
def test_other_tools_are_refused_by_name_on_all_ranks(ranks, transport):
    found = ranks(2)(other_tools, transport)
    for texts in found:
        wrong = {n: t for n, t in texts.items() if t.startswith(("UNTYPED", "NO ERROR"))}
        assert not wrong
        assert "tracing of a sharded model: expected a whole model" in texts["trace"]
        assert texts["make_fx"] == texts["trace"]
        assert "Remove DistributedDataParallel" in texts["ddp"]
    assert found[0]["float"] == found[1]["float"]
