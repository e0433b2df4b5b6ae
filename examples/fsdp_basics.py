"""The smallest sharded training: one model, one wrap, and the training loop of one process.

    torchrun --nproc_per_node=2 examples/fsdp_basics.py

Each rank stores a part of every parameter and reads its own half of the data. The printed loss is
the mean over all ranks, which is the loss of one process on the whole batch.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from fullshard.compat.fsdp1 import FullyShardedDataParallel as FSDP


class Classifier(nn.Module):
    """Three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def main() -> None:
    """Train for twenty steps."""
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")

    torch.manual_seed(0)  # equal initial weights on every rank
    model = FSDP(Classifier().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after wrapping: it updates shards

    own = sum(parameter.numel() for parameter in model.parameters())
    whole = sum(parameter.numel() for parameter in Classifier().parameters())
    print(f"rank {rank}: {own:,} of {whole:,} parameters")

    data = torch.Generator().manual_seed(rank)  # different data on every rank
    centers = torch.randn(10, 32, generator=torch.Generator().manual_seed(7))
    for step in range(20):
        labels = torch.randint(0, 10, (64,), generator=data)
        inputs = centers[labels] + 0.5 * torch.randn(64, 32, generator=data)
        loss = nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
        loss.backward()
        model.clip_grad_norm_(1.0)  # clips by the norm of the whole gradient
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1:2}  loss {mean.item() / world_size:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
