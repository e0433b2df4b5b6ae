"""No operation of a step makes the host wait for a GPU; a CPU test finds those that would."""

from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import fullshard as fs
from fullshard.engine import engine, norms
from fullshard.engine import step as stepping
from fullshard.transport import groups, streams
from support.grid import chequered
from support.models import CHAIN
from support.ranks import on_ranks

WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "item", "is_nonzero"}
READS = {"tolist", "numpy", "cpu", "__array__"}  # not operations on a CPU


class HostWaits(TorchDispatchMode):
    """Records operations for which the host would wait: reads of values, and pageable copies.

    A tensor that `torch.tensor(numbers)` makes is on the host. Only `norms.from_host`, whose copy
    is pinned and not awaited, may bring it to the device.
    """

    def __init__(self):
        super().__init__()
        self.found, self.made = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if torch.is_tensor(x)]
        if name in WAITS:
            self.found.append(name)
        if name in ("index", "index_put_") and any(
            index is not None and (index.dtype is torch.bool or self.is_host(index))
            for index in args[1]
        ):
            self.found.append(f"{name} by a list or a mask")
        elif name not in ("lift_fresh", "detach") and any(map(self.is_host, tensors)):
            self.found.append(f"{name} of numbers of the host")
        result = func(*args, **(kwargs or {}))
        if name == "lift_fresh" and result.dim():
            self.made.append(result)
        return result

    def is_host(self, tensor):
        return any(tensor is made for made in self.made)


def host_reads(found):
    """Context that records reads of tensors without an operation.

    Replaces methods, because function modes are disabled in calls from autograd.
    """

    def noting(name, read):
        return lambda *args, **kwargs: found.append(name) or read(*args, **kwargs)

    reads = {name: noting(name, getattr(torch.Tensor, name)) for name in READS}
    return patch.multiple(torch.Tensor, **reads)


@contextmanager
def watched(model):
    """Context that also sees the engine's operations, which run outside of the user's modes.

    To the engine, the CPU is a device with streams.
    """
    mode, device = HostWaits(), SimpleNamespace(event=lambda: None, finish=lambda _: None)

    def crosses(numbers, device, dtype=torch.float64):
        before = len(mode.made)
        tensor = from_host(numbers, device, dtype)
        del mode.made[before:]
        return tensor

    def arrived(self):
        before = len(mode.found)
        finish_checks(self)
        del mode.found[before:]

    from_host, finish_checks = norms.from_host, norms.GradientNorms.finish_checks
    patches = [
        patch.object(stepping, "has_modes", lambda: False),
        patch.object(streams, "of", lambda _: device),
        patch.object(engine.engine_of(model).norms, "streams", device),
        patch.object(norms.GradientNorms, "finish_checks", arrived),
    ]
    for place in ("norms", "gradients", "replicas"):
        patches.append(patch(f"fullshard.engine.{place}.from_host", crosses))
    with ExitStack() as stack:
        for each in (*patches, host_reads(mode.found), mode):
            stack.enter_context(each)
        yield mode


CLIPS = {
    "ours": lambda model: fs.clip_grad_norm_(model, 1e9),
    "torch's": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9),
    "by value": lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1e9),
    "norms of some": lambda model: torch.nn.utils.get_total_norm(
        [p.grad for p in list(model.parameters())[1:]]
    ),
}


SETTINGS = [
    {"transport": "direct"},
    {"transport": "direct", "param_dtype": "bf16", "reduce_dtype": "fp32"},
    {"transport": "direct", "activation_checkpointing": "block"},
    {"strategy": "no_shard", "transport": "direct"},
]


@pytest.mark.parametrize(("settings", "clip"), chequered(SETTINGS, CLIPS, every=4), ids=str)
@on_ranks(2)
def test_no_step_waits_for_its_device(settings, clip):
    case = CHAIN
    with patch.object(
        groups, "first_tag", lambda: 0
    ):  # as over NCCL, where ranks do not compare messages
        model = fs.shard(case.build(), **settings)
    elementwise = partial(torch.optim.SGD, lr=1e-3, momentum=0.9, foreach=True)
    optimizer = elementwise(model.parameters())
    if clip == "ours":
        optimizer = fs.owned(model, elementwise)
    found = []
    for step in range(4):
        batch = case.batch(step, dist.get_rank())
        around = watched(model) if step >= 2 else nullcontext()  # the order is learned by then
        with around as mode, patch.object(engine, "STEPS", 2):  # replicas are compared as well
            with fs.no_sync(model):
                case.loss(model(**batch)).backward()
            case.loss(model(**batch)).backward()
            CLIPS[clip](model)
            optimizer.step()
            optimizer.zero_grad()
        found += [] if mode is None else mode.found
    assert found == []


def a_host_that_waits():
    x = torch.ones(3)
    with HostWaits() as mode, host_reads(mode.found):
        x[[0, 2]]
        x.cpu()
        torch.cat([torch.tensor([1.0]), x])
        x.sum().item()
        x[x > 0]
        x.tolist()
    return mode.found


def test_operations_that_wait_are_detected():
    assert len(a_host_that_waits()) == 6


class Crossing:
    """A tensor of a GPU or of the host's memory that records how it is copied."""

    is_cuda = True

    def __init__(self, noted):
        self.noted = noted

    def noting(self, *_, **how):
        self.noted.append(how)
        return self

    to = copy_ = noting


def test_numbers_are_copied_through_pinned_memory_without_waiting(monkeypatch):
    noted = []
    tensor, pinned = Crossing(noted), {"pin_memory": True}
    monkeypatch.setattr(torch, "tensor", lambda *_, dtype, **how: tensor.noting(**how))
    monkeypatch.setattr(torch, "empty_like", lambda *_, device, **how: tensor.noting(**how))
    norms.from_host([1.0], torch.device("cuda", 0))
    norms.to_host(tensor)
    assert noted == 2 * [pinned, {"non_blocking": True}]
