"""Save and resume: rank 0 writes the full state dicts of the model and of the optimizer.

    torchrun --nproc_per_node=2 examples/fsdp_checkpoint.py

Ten uninterrupted steps, and five steps, a save, a load into a new model and five more steps, give
the same losses. The file is plain torch: any number of ranks can load it, or one unsharded process.
"""

from __future__ import annotations

import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fullshard.compat.fsdp1 import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    StateDictType,
)
from fullshard.compat.fsdp1 import FullyShardedDataParallel as FSDP


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Creates a model and its optimizer."""
    torch.manual_seed(0)
    model = FSDP(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Returns the losses of some steps."""
    losses: list[float] = []
    for step in steps:
        x = torch.randn(
            8, 16, generator=torch.Generator().manual_seed(100 * step + dist.get_rank())
        )
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(model: nn.Module) -> AbstractContextManager[None]:
    """Context in which state dicts are those of the unsharded model, on rank 0 only."""
    return FSDP.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
    )


def save(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Rank 0 writes the file; all ranks must call it."""
    with whole(model):
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
    if dist.get_rank() == 0:
        torch.save(state, path)
        print(f"saved {sum(value.numel() for value in state['model'].values()):,} parameters")
    dist.barrier()


def load(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Every rank reads the file and keeps its own part."""
    state = torch.load(path, weights_only=True)  # noqa: TID251  (torch's own format)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.load_state_dict(state["model"])
        own = FSDP.optim_state_dict_to_load(model, optimizer, state["optim"])
    optimizer.load_state_dict(own)


def main() -> None:
    """Compares an uninterrupted run with one that was saved and resumed."""
    dist.init_process_group("gloo")
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name)
    folder = Path(name[0])

    at_once = train(*build(), range(10))
    model, optimizer = build()
    first = train(model, optimizer, range(5))
    save(model, optimizer, folder / "run.pt")
    model, optimizer = build()
    load(model, optimizer, folder / "run.pt")
    both = first + train(model, optimizer, range(5, 10))
    if dist.get_rank() == 0:
        print("in one go    ", " ".join(f"{loss:.4f}" for loss in at_once))
        print("saved between", " ".join(f"{loss:.4f}" for loss in both))
        print("equal" if at_once == both else "DIFFERENT")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
