"""A model that torch shards over a tensor axis, with sizes that do not divide evenly."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fullshard as fs
from support.models import backward_of, perturbed
from support.parity import assert_same, finish_step
from support.reference import NUM_STEPS, make_optimizer, train_alone
from support.sizes import sizes_of

WIDTH, LENGTH = 12, 8


def mesh_of(replicate: int = 1, shard: int = 2, tensor: int = 2) -> DeviceMesh:
    names = ("replicate", "shard", "tensor")
    return init_device_mesh("cpu", (replicate, shard, tensor), mesh_dim_names=names)


class Block(nn.Module):
    """A norm on a part of the sequence and two sharded layers; sizes do not divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 3)
        self.down = nn.Linear(2 * WIDTH + 3, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net() -> nn.Module:
    torch.manual_seed(0)
    return perturbed(Net().double())


def cut_net(model: nn.Module, mesh: DeviceMesh) -> None:
    sequence = Shard(1)
    for block in model.blocks:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=sequence, use_local_output=False),
            "down": RowwiseParallel(output_layouts=sequence),
        }
        parallelize_module(block, mesh, plan)
    ends = {
        "blocks.0": PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=sequence, use_local_output=True
        ),
        "head": ColwiseParallel(input_layouts=sequence, output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)


# ---- batches and steps

LLAMA = sizes_of(16, 26, 4, 2, layers=2, vocab_size=50)


def vectors(step: int, seat: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + seat)
    return torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, generator=generator)


def tokens(step: int, seat: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + seat)
    return torch.randint(LLAMA["vocab_size"], (2, LENGTH), generator=generator)


def train_llama(model: nn.Module, step: int, seat: int) -> torch.Tensor:
    batch = tokens(step, seat)
    return backward_of(model(input_ids=batch, labels=batch).loss)


def full_gradients(model: nn.Module) -> dict[str, Any]:
    """Returns gradients gathered over both axes."""
    grads = {name: param.grad for name, param in model.named_parameters()}
    return {name: None if g is None else g.full_tensor() for name, g in grads.items()}


def full_params(model: nn.Module) -> dict[str, Any]:
    """Returns parameters gathered over both axes."""
    return {name: param.detach().full_tensor() for name, param in model.named_parameters()}


def check_steps(
    build: Callable[[], nn.Module],
    cut: Callable[[nn.Module], dict[str, Any]],
    work: Callable[[nn.Module, int, int], torch.Tensor],
    kinds: Iterable[str],
    tensor: int = 1,
) -> None:
    """Compares steps with one process; AdamW is made before sharding, torch clips for it.

    Args:
        build: Builds the model.
        cut: Shards it over other axes; returns arguments of fs.shard.
        work: Forward and backward of a batch.
        kinds: Optimizers.
        tensor: Ranks that share a batch.
    """
    world = dist.get_world_size()
    seat = dist.get_rank() // tensor
    for kind in kinds:
        wanted = train_alone(build, work, world_size=world // tensor, kind=kind)
        model = build()
        arguments = cut(model)
        before = [(name, id(param)) for name, param in model.named_parameters()]
        early = make_optimizer(kind, model.parameters()) if kind == "adamw" else None
        fs.shard(model, poison=True, **arguments)
        assert [(name, id(param)) for name, param in model.named_parameters()] == before
        made = partial(make_optimizer, kind)
        whole = kind == "adafactor"  # one process sees whole matrices
        optimizer = early or (fs.owned(model, made) if whole else made(model.parameters()))
        found = [
            finish_step(
                model,
                optimizer,
                [work(model, step, seat)],
                torch_clips=early is not None,
                gradients_of=full_gradients,
                params_of=full_params,
            )
            for step in range(NUM_STEPS)
        ]
        for step in wanted:
            step.losses[:] = [step.losses[seat]] * world
        assert_same(found, wanted)


def assert_numbers(model: nn.Module, alone: nn.Module, seats: int) -> None:
    """Compares numbers of parameters and gradients with one process that sums all ranks."""
    for (name, one), ours in zip(alone.named_parameters(), model.parameters(), strict=True):
        one.grad /= seats
        for ask in ("sum", "mean", "std", "norm"):
            found, wanted = getattr(ours.grad, ask)(), getattr(one.grad, ask)()
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14, msg=f"{ask} {name}")
        norm = fs.global_norm([ours])
        torch.testing.assert_close(norm, one.detach().norm(), rtol=1e-12, atol=0, msg=name)
        assert (ours.grad * 0 == 0).all()


def train_net(model: nn.Module, step: int, seat: int) -> torch.Tensor:
    return backward_of(model(vectors(step, seat)).pow(2).mean())


def whole_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns full weights and AdamW states on every rank."""
    states = fs.full_optimizer_state_dict(model, optimizer, rank0_only=False)["state"]
    found = dict(fs.full_state_dict(model, rank0_only=False))
    return found | {f"{number}.{key}": v for number, s in states.items() for key, v in s.items()}
