"""Low-precision compute with full-precision masters, compared with an emulation and FSDP2.

The emulation casts whole float32 masters to the compute dtype, runs the ranks' batches one after
another, and sums their gradients in float32 in rank order. It uses nothing of fullshard.
"""

import contextlib
import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard as fs
from fullshard.config.values import ReductionKind
from fullshard.engine.engine import engine_of
from fullshard.planner.mesh import Mesh
from support.grid import STRATEGIES
from support.models import CASES, backward_of, float32_batch, float32_model, mean_square
from support.parity import assert_planned_events, whole_gradients, whole_params
from support.ranks import on_ranks
from support.streams import Groups, Played

NAMES = ("chain", "llama", "tied llama", "mixture of experts")
MARKS = {("chain", 2): (), ("tied llama", 2): pytest.mark.long}
NUM_STEPS = 3
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
KINDS = (torch.float16, torch.bfloat16, torch.float32)


def make_optimizer(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def emulate(name, dtype):
    """Returns (gradients, masters) after each step, and every rank's losses."""
    case, size = CASES[name], dist.get_world_size()
    master = float32_model(name)
    compute = copy.deepcopy(master)
    pairs = list(zip(master.parameters(), compute.parameters(), strict=True))
    optimizer = make_optimizer(master.parameters())
    steps = []
    for step in range(NUM_STEPS):
        losses, total = [], [torch.zeros_like(p) for p in master.parameters()]
        for rank in range(size):
            for whole, low in pairs:
                low.data = whole.detach().to(dtype)
            inputs = float32_batch(name, step, rank, dtype)
            losses.append(backward_of(case.loss(compute(**inputs))))
            for at, (_, low) in enumerate(pairs):
                total[at] += low.grad.float()
                low.grad = None
        for (whole, _), gradient in zip(pairs, total, strict=True):
            whole.grad = gradient / size
        gradients = {n: p.grad.clone() for n, p in master.named_parameters()}
        optimizer.step()
        params = {n: p.detach().clone() for n, p in master.named_parameters()}
        steps.append((losses, gradients, params))
    return steps


def steps_of(name, model, gradients, params):
    """Returns a sharded model's losses on this rank, full gradients and parameters."""
    case, rank = CASES[name], dist.get_rank()
    optimizer = make_optimizer(model.parameters())
    steps = []
    for step in range(NUM_STEPS):
        loss = backward_of(case.loss(model(**float32_batch(name, step, rank))))
        found = gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((loss, found, params(model)))
    return steps


def train(name, settings):
    model = fs.shard(float32_model(name), poison=True, **settings)
    return model, steps_of(name, model, whole_gradients, whole_params)


def assert_bits(found, wanted, what):
    """Compares gradients, parameters and this rank's losses bit by bit."""
    rank = dist.get_rank()
    for step, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        losses = theirs[0][rank] if isinstance(theirs[0], list) else theirs[0]
        assert torch.equal(ours[0], losses), f"{what}, step {step}: {ours[0]} is not {losses}"
        for kind, a, b in (("gradient", ours[1], theirs[1]), ("parameter", ours[2], theirs[2])):
            assert a.keys() == b.keys()
            for name in a:
                assert a[name].dtype == b[name].dtype == torch.float32
                assert torch.equal(a[name], b[name]), (
                    f"{what}, step {step}: {kind} {name} differs by "
                    f"{float((a[name] - b[name]).abs().max()):.3g}"
                )


# ---- the emulation -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "world_size", "dtype"),
    [
        *(
            pytest.param(name, size, "bf16", marks=MARKS.get((name, size), pytest.mark.slow))
            for name in NAMES
            for size in (1, 2, 3)
        ),
        pytest.param("chain", 2, "fp16", marks=pytest.mark.long),
    ],
)
@on_ranks("world_size", timeout=100)
def test_low_precision_compute_has_the_bits_of_its_emulation(name, dtype):
    wanted = emulate(name, DTYPES[dtype])
    for strategy in STRATEGIES:
        for transport in ({}, {"transport": "c10d", "reduction": "ordered"}):
            settings = {"strategy": strategy, "param_dtype": dtype, **transport}
            model, found = train(name, settings)
            assert_bits(found, wanted, f"{name}, {settings}")
            assert_planned_events(model, NUM_STEPS - 1)


@on_ranks(3)
def test_a_bfloat16_wire_is_summed_in_float32():
    """Gradients computed in bfloat16 lose no precision when sent in bfloat16."""
    wanted = emulate("llama", torch.bfloat16)
    for strategy in STRATEGIES:
        settings = {"strategy": strategy, "param_dtype": "bf16", "reduce_dtype": "bf16"}
        _, found = train("llama", settings)
        assert_bits(found, wanted, str(settings))


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_a_sum_may_exceed_the_range_of_float16(num_ranks):
    """NCCL sums in the dtype of the wire; equal ranks emulate it here."""
    groups, config = Groups(Played()), SimpleNamespace(reduction=ReductionKind.NATIVE)
    with groups.in_place():
        transport = groups.make_transport(config, Mesh(1, num_ranks))
        gradients = [torch.full((64 * num_ranks,), 20_000.0, dtype=dtype) for dtype in KINDS]
        sums = [torch.zeros(64) for _ in KINDS]
        transport.reduce(gradients).sum_into(sums)
    for found in sums:
        torch.testing.assert_close(
            found, torch.full((64,), 20_000.0 * num_ranks), rtol=3e-3, atol=0
        )


@on_ranks(2)
def test_deferred_gradients_are_summed_in_float32():
    """Micro-batches under no_sync are summed in float32 on their rank, then over ranks."""
    size = dist.get_world_size()
    model = fs.shard(float32_model("chain"), param_dtype="bf16", poison=True)
    for micro in range(3):
        with fs.no_sync(model) if micro < 2 else contextlib.nullcontext():
            mean_square(model(**float32_batch("chain", micro, dist.get_rank()))).backward()
    found, low = whole_gradients(model), float32_model("chain").bfloat16()
    wanted = {name: torch.zeros(p.shape) for name, p in low.named_parameters()}
    for rank in range(size):
        own = {name: torch.zeros(p.shape) for name, p in low.named_parameters()}
        for micro in range(3):
            mean_square(low(float32_batch("chain", micro, rank)["x"].bfloat16())).backward()
            for name, param in low.named_parameters():
                own[name] += param.grad.float()
                param.grad = None
        for name, value in own.items():
            wanted[name] += value
    for name, value in wanted.items():
        assert torch.equal(found[name], value / size), name


# ---- FSDP2 ---------------------------------------------------------------------------------------


def train_fsdp2(name):
    """Trains torch's fully_shard over blocks and root, with the same dtypes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = float32_model(name)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in model.modules():
        if type(module).__name__ in CASES[name].blocks:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return steps_of(
        name,
        model,
        lambda model: {n: p.grad.full_tensor() for n, p in model.named_parameters()},
        lambda model: {n: p.full_tensor().detach().clone() for n, p in model.named_parameters()},
    )


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        ("llama", 2),
        pytest.param("chain", 3, marks=pytest.mark.long),
        pytest.param("chain", 2, marks=pytest.mark.slow),
        pytest.param("llama", 3, marks=pytest.mark.slow),
    ],
)
@on_ranks("world_size", timeout=100)
def test_bfloat16_compute_equals_fsdp2s(name):
    theirs = train_fsdp2(name)
    _, ours = train(name, {"param_dtype": "bf16", "reduce_dtype": "fp32"})
    if dist.get_world_size() == 2:  # a sum of two has one order, and halving it is exact
        assert_bits(ours, theirs, name)
        return
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a[0], b[0], rtol=2e-2, atol=1e-3)
        for kind in (1, 2):  # rounding of the sum may round a bfloat16 weight differently
            for key in a[kind]:
                torch.testing.assert_close(a[kind][key], b[kind][key], rtol=2e-2, atol=1e-3)


# ---- the contract --------------------------------------------------------------------------------

CONTRACTS = {  # settings, and dtypes (master, compute, reduce, accumulate) of a float32 model
    "plain": ({}, "float32 float32 float32 float32"),
    "bf16": ({"param_dtype": "bf16"}, "float32 bfloat16 float32 float32"),
    "bf16 wire": (
        {"param_dtype": "bf16", "reduce_dtype": "bf16"},
        "float32 bfloat16 bfloat16 float32",
    ),
    "fp16": ({"param_dtype": "fp16"}, "float32 float16 float32 float32"),
    "wide": ({"master_dtype": "fp64"}, "float64 float64 float64 float64"),
    "wide master": (
        {"master_dtype": "fp64", "param_dtype": "fp32"},
        "float64 float32 float64 float64",
    ),
}


def dtypes_of(settings):
    """Returns the dtypes of the plan, of a step's tensors, and of outputs."""
    model = fs.shard(float32_model("chain"), poison=True, **settings)
    engine, seen = engine_of(model), set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(
                lambda m, args, out, name=name: seen.add(
                    (str(m.weight.dtype), str(args[0].dtype), str(out.dtype))
                )
            )
    x = float32_batch("chain", 0, dist.get_rank())["x"]
    output = model(x if "param_dtype" in settings else x.to(next(model.parameters()).dtype))
    output.square().mean().backward()
    groups = [group for unit in engine.units for group in unit.groups]
    planned = {" ".join(map(str, _fields(g.plan.dtypes))) for g in groups}
    tensors = {
        " ".join(
            str(t.dtype).removeprefix("torch.")
            for t in (g.master, g.full, g.grad_slot, g.grads.sums)
        )
        for g in groups
    }
    shown = {str(t.dtype) for p in model.parameters() for t in (p, p.grad, p.to_local())}
    return planned, tensors, shown, seen, str(output.dtype)


def _fields(dtypes):
    return dtypes.master, dtypes.compute, dtypes.reduce, dtypes.accumulate


@on_ranks(2)
def test_tensors_have_the_dtypes_that_the_plan_lists():
    by_case = {
        (name, strategy): dtypes_of({"strategy": strategy, **settings})
        for name, (settings, _) in CONTRACTS.items()
        for strategy in STRATEGIES
    }
    for (name, strategy), (planned, tensors, shown, seen, output) in by_case.items():
        wanted = CONTRACTS[name][1]
        master, compute, _, _ = (f"torch.{word}" for word in wanted.split())
        assert planned == tensors == {wanted}, (name, strategy)
        assert shown == {master}, (name, strategy)
        assert seen == {(compute, compute, compute)}, (name, strategy)
        assert output == compute, (name, strategy)


# ---- inputs --------------------------------------------------------------------------------------


class Inputs(nn.Module):
    """Records the dtypes of all its inputs, nested as by users."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen = {}

    def forward(self, x, *, mask, more, scale=1.0):
        self.seen = {
            "x": x.dtype,
            "mask": mask.dtype,
            "list": more["list"][0].dtype,
            "tuple": more["tuple"][1].dtype,
            "ids": more["ids"].dtype,
            "scale": type(scale),
        }
        return self.linear(x) * more["list"][0] * scale


@pytest.mark.parametrize("settings", [{"param_dtype": "bf16"}, {}])
@on_ranks(2)
def test_floating_point_inputs_are_cast_and_others_are_not(settings):
    model = fs.shard(Inputs(), **settings)
    x = torch.ones(2, 4, requires_grad=True)
    more = {"list": [torch.ones(4)], "tuple": (1, torch.ones(4)), "ids": torch.arange(4)}
    model(x, mask=torch.ones(2, dtype=torch.bool), more=more, scale=0.5).sum().backward()
    assert x.grad.dtype == torch.float32
    assert more["list"][0].dtype == torch.float32, "the caller's own tensors stay as they are"
    dtype = torch.bfloat16 if settings else torch.float32
    wanted = dict.fromkeys(("x", "list", "tuple"), dtype)
    assert model.seen == {**wanted, "ids": torch.int64, "mask": torch.bool, "scale": float}
