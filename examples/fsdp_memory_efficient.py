"""Measures on this machine how much memory each technique saves.

    torchrun --nproc_per_node=2 examples/fsdp_memory_efficient.py

Every row trains a new model for three steps. The first number is the engine's peak memory on rank 0
by `fullshard.memory_stats`: parameters, gradients, optimizer state, and buffers of gathered units.
The second is the activations that autograd saved for one backward. Ranks of one host share gathered
weights, so the two sharded strategies are equal there. A CPU has no other memory to offload to, so
that row shows only the cost of the copies.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch import nn

import fullshard as fs
from fullshard.compat.fsdp1 import (
    CheckpointImpl,
    CPUOffload,
    ShardingStrategy,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from fullshard.compat.fsdp1 import FullyShardedDataParallel as FSDP
from fullshard.compat.fsdp1.wrap import ModuleWrapPolicy

WIDTH, BATCH = 256, 192


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def measure(
    strategy: ShardingStrategy, *, recompute: bool = False, offload: bool = False
) -> tuple[int, int]:
    """Returns the engine's peak bytes on this rank, and the bytes that autograd saved."""
    torch.manual_seed(0)
    model = FSDP(
        nn.Sequential(*(Block() for _ in range(8))),
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        cpu_offload=CPUOffload(offload_params=offload),
    )
    if recompute:  # backward recomputes a block's activations
        wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: isinstance(module, Block)
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[:1] == (BATCH,):  # autograd saves weights, too
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    for step in range(3):
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return fs.memory_stats(model)["total"]["peak"], sum(kept.values())


def main() -> None:
    """Prints the table."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        print(f"{'':<24}{'engine':>12}{'activations':>12}")
    rows = [
        ("NO_SHARD", {"strategy": ShardingStrategy.NO_SHARD}),
        ("SHARD_GRAD_OP", {"strategy": ShardingStrategy.SHARD_GRAD_OP}),
        ("FULL_SHARD", {"strategy": ShardingStrategy.FULL_SHARD}),
        ("FULL_SHARD, recompute", {"strategy": ShardingStrategy.FULL_SHARD, "recompute": True}),
        ("FULL_SHARD, offload", {"strategy": ShardingStrategy.FULL_SHARD, "offload": True}),
    ]
    for name, options in rows:
        held, kept = measure(**options)
        if dist.get_rank() == 0:
            print(f"{name:<24}{held / 2**20:8.1f} MiB{kept / 2**20:8.1f} MiB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
