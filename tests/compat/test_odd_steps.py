"""Unusual steps of both interfaces: frozen, unused and repeated parts, unusual inputs."""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import get_rank as rank

from fullshard.compat.fsdp1 import FullyShardedDataParallel as FSDP
from fullshard.compat.fsdp1 import ModuleWrapPolicy, ShardingStrategy, always_wrap_policy
from fullshard.compat.fsdp2 import fully_shard
from fullshard.errors import UnsupportedModelError
from support.compat import TOLERANCE, TransformerBlock, build, loss_of
from support.ranks import on_ranks


def bottom_up(model):
    for child in model.children():
        fully_shard(child)
    return fully_shard(model)


WRAPS: list[Callable[[nn.Module], nn.Module]] = [
    lambda net: FSDP(net, auto_wrap_policy=always_wrap_policy, use_orig_params=True),
    lambda net: FSDP(net, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    lambda net: FSDP(net, sharding_strategy=ShardingStrategy.NO_SHARD),
    bottom_up,
]


class Parts(nn.Module):
    """Three layers; the caller chooses which run, and how often."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, mode="all"):
        x = x["x"] if isinstance(x, dict) else x
        x = x[0] if isinstance(x, list) else x
        x = x.x if isinstance(x, Boxed) else x
        match mode:
            case "all":
                return self.c(self.b(self.a(x)))
            case "skip":  # b is not used
                return self.c(self.a(x))
            case "twice":
                return self.c(self.b(self.b(self.a(x))))
            case "detached":
                return self.c(self.b(self.a(x)).detach())
        return Boxed(self.c(self.a(x)))  # b is unused, and the output is an object


@dataclass
class Boxed:
    x: torch.Tensor


def losses(model, mode, ranks):
    found = []
    for number in ranks:
        out = model(torch.full((2, 4), 1.0 + number), mode)
        found.append((out.x if isinstance(out, Boxed) else out).square().mean())
    return torch.stack(found).mean()


def step_both(model, reference, optimizers, mode="all"):
    """Steps a wrapped model and one process; compares gradients and parameters."""
    losses(model, mode, [rank()]).backward()
    losses(reference, mode, [0, 1]).backward()
    with torch.no_grad():
        model.eval()
        losses(model, "all", [rank()])
        model.train()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) is (theirs.grad is None), mode
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours.full_tensor(), theirs, atol=TOLERANCE), mode


@on_ranks(2)
def test_units_that_are_unused_repeated_or_cut_off():
    for wrap in WRAPS:
        torch.manual_seed(0)
        net = Parts()
        reference = copy.deepcopy(net)
        model = wrap(net)
        optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, reference)]
        for mode in ("all", "skip", "boxed", "twice", "detached", "all"):
            step_both(model, reference, optimizers, mode)
        for boxed in ({"x": torch.ones(1, 4)}, [torch.ones(1, 4)], Boxed(torch.ones(1, 4))):
            assert torch.allclose(model(boxed), reference(boxed), atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*has both parameters with requires_grad")
@on_ranks(2)
def test_frozen_parameters_train_as_in_one_process():
    for wrap in WRAPS:
        torch.manual_seed(0)
        net = Parts()
        net.a.requires_grad_(False)
        net.b.bias.requires_grad_(False)
        reference = copy.deepcopy(net)
        model = wrap(net)
        trained = [[p for p in m.parameters() if p.requires_grad] for m in (model, reference)]
        optimizers = [torch.optim.SGD(params, lr=0.1) for params in trained]
        for _ in range(3):
            step_both(model, reference, optimizers)


@on_ranks(2)
def test_layers_frozen_in_a_forward_alone_get_no_gradient():
    """From the first forward on, which makes the plan; they are thawed before the backward."""
    for wrap in WRAPS:
        torch.manual_seed(0)
        net = Parts()
        reference = copy.deepcopy(net)
        model = wrap(net)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
        for part in ("a", "c", "b", "a"):
            grads = []
            for one, layers, seats in ((model, net, [rank()]), (reference, reference, [0, 1])):
                getattr(layers, part).requires_grad_(False)
                loss = losses(one, "all", seats)
                layers.requires_grad_(True)
                loss.backward()
                grads.append([p.grad is None for p in one.parameters()])
            assert grads[0] == grads[1]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(ours.full_tensor(), theirs, atol=TOLERANCE)


@pytest.mark.parametrize("own", [False, True])
@on_ranks(1)
def test_a_layer_of_two_sharded_models_is_named_with_the_way_out(own):
    layer = fully_shard(nn.Linear(4, 4)) if own else nn.Linear(4, 4)
    first, second = (fully_shard(nn.Sequential(nn.Linear(4, 4), layer)) for _ in range(2))
    first(torch.ones(1, 4)).sum().backward()
    with pytest.raises(UnsupportedModelError, match=r"another sharded model has it, too\. Put mod"):
        second(torch.ones(1, 4))


@on_ranks(2)
def test_optimizer_groups_ties_and_half_after_wrapping():
    """Covers groups by name, a tied head, two forwards before a backward, and late steps."""

    def optimizer_of(model):
        named = list(model.named_parameters())
        return torch.optim.AdamW(
            [
                {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
                {"params": [p for _, p in named if p.ndim >= 2], "lr": 3e-3},
            ],
            lr=1e-3,
            weight_decay=0.1,
        )

    blocks = ModuleWrapPolicy({TransformerBlock})
    for wrap in (lambda net: FSDP(net, auto_wrap_policy=blocks), fully_shard):
        reference = build(tied=True)
        model = wrap(build(tied=True))
        optimizers = [optimizer_of(model), optimizer_of(reference)]
        assert [n for n, _ in model.named_parameters()] == [
            n for n, _ in reference.named_parameters()
        ]
        for step in range(3):
            (loss_of(model, 2 * step, rank()) + loss_of(model, 2 * step + 1, rank())).backward()
            for other in range(2):
                both = loss_of(reference, 2 * step, other) + loss_of(reference, 2 * step + 1, other)
                (both / 2).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=step % 2 == 0)
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(ours.full_tensor(), theirs, atol=2e-5)
        half = model.half()
        loss_of(half, 9, rank()).backward()
        assert {param.grad.dtype for param in half.parameters()} == {torch.float16}


@on_ranks(2)
def test_optimizers_without_states_and_what_a_wrapper_says():
    model = FSDP(Parts(), auto_wrap_policy=always_wrap_policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses(model, "all", [rank()]).backward()
    optimizer.step()
    state = FSDP.optim_state_dict(model, optimizer)
    assert state["state"] == {}
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))
    assert model.rank == rank()
    assert model.world_size == 2
    assert model.process_group is dist.group.WORLD
    assert model.compute_device == torch.device("cpu")
    assert model.mixed_precision.param_dtype is None
    assert model.cpu_offload.offload_params is False


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 7))


def in_inference_mode(model, x):
    with torch.inference_mode():
        return model(x).clone()


def in_a_transformation(model, x):
    return torch.func.vjp(model, x)[0].detach()


def in_a_vmap(model, x):
    return torch.vmap(model)(x).detach()


@pytest.mark.short(3)
@on_ranks(2)
@pytest.mark.parametrize("wrap", [fully_shard, FSDP])
@pytest.mark.parametrize("run", [in_inference_mode, in_a_transformation, in_a_vmap])
def test_a_model_may_run_first_in_a_mode_or_a_transformation(run, wrap):
    """The engine is created inside, and stays usable outside."""
    reference, model = layers(), wrap(layers())
    x = torch.ones(2, 5)
    torch.testing.assert_close(run(model, x), run(reference, x))
    for net in (reference, model):
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        for _ in range(2):
            net(x).square().mean().backward()
            optimizer.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs.detach())


@on_ranks(2)
def test_moved_shards_are_copied_back_when_no_rank_reads_the_old_values():
    """Rank 0 is slow inside its forward; rank 1 moves its shards and begins the next one."""
    torch.manual_seed(0)
    model, x = FSDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 7))), torch.ones(2, 4)
    wanted = model(x)
    if rank() == 0:
        model.module[0].register_forward_pre_hook(lambda *_: time.sleep(0.3))
    found = model(x)
    with torch.no_grad():
        for param in model.parameters():
            param.data = param.data * 0
        after = model(x)
    assert torch.equal(found, wanted)
    assert not after.any()
