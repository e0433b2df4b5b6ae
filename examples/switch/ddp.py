"""A training loop on DistributedDataParallel: torchrun --nproc-per-node 2 ddp.py FOLDER."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = DDP(model)
    raw_model = model.module
    tokens = torch.randint(64, (8, 2, size, 4, 9))[:, :, rank]
    losses = []
    for step in tokens:
        for at, batch in enumerate(step):
            model.require_backward_grad_sync = at == len(step) - 1
            scores = model(batch[:, :-1])
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
            (loss / len(step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    if rank == 0:
        state = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict()}
        Path(sys.argv[1]).mkdir(exist_ok=True)
        torch.save(state, f"{sys.argv[1]}/ckpt.pt")
        print("losses", *losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
