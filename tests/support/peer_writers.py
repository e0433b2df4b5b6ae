"""Checkpoints that DeepSpeed and Accelerate write: python peer_writers.py WHAT FOLDER RANK.

Two ranks on gloo, on the CPU. Rank 0 also writes `reference.pt`: the full state dict that the tool
itself assembles.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

WORLD_SIZE = 2


class Net(nn.Module):
    """Odd sizes, a buffer, a frozen parameter, and a group that contains one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7)
        self.frozen = nn.Linear(7, 7, bias=False).requires_grad_(False)
        self.outer = nn.Linear(7, 3)
        self.register_buffer("shift", torch.full((7,), 0.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.inner(x))
        return self.outer(torch.tanh(hidden + self.shift.to(hidden.dtype)))


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def write_deepspeed(folder: Path, rank: int, stage: int) -> None:
    import deepspeed
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    model = net()
    groups = [
        {"params": [p for p in model.parameters() if p.requires_grad and p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.requires_grad and p.ndim < 2]},
    ]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": stage > 1},
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=config
    )
    dtype = torch.bfloat16 if stage > 1 else torch.float32
    for step in range(2):
        torch.manual_seed(10 * step + rank)
        engine.backward(engine(torch.randn(4, 5).to(dtype)).float().square().mean())
        engine.step()
    engine.save_checkpoint(str(folder / "theirs"))
    if rank == 0:
        state = get_fp32_state_dict_from_zero_checkpoint(str(folder / "theirs"))
        torch.save(
            {k: torch.as_tensor(v).clone() for k, v in state.items()}, folder / "reference.pt"
        )


def write_accelerate(folder: Path, rank: int, kind: str) -> None:
    """Uses Accelerate's functions; its Accelerator supports FSDP only on GPUs."""
    import accelerate
    from accelerate.utils import fsdp_utils
    from torch.distributed.fsdp import fully_shard

    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type=kind, cpu_ram_efficient_loading=False
    )
    model = net()
    fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (WORLD_SIZE,)))
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for step in range(2):
        torch.manual_seed(10 * step + rank)
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    seat = SimpleNamespace(
        process_index=rank, num_processes=WORLD_SIZE, wait_for_everyone=torch.distributed.barrier
    )
    seat.is_main_process = rank == 0
    accelerate.PartialState(cpu=True)  # its logger needs one
    fsdp_utils.save_fsdp_model(plugin, seat, model, str(folder / "theirs"))
    fsdp_utils.save_fsdp_optimizer(plugin, seat, optimizer, model, str(folder / "theirs"))
    state = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in model.state_dict().items()
    }
    if rank == 0:
        torch.save(state, folder / "reference.pt")


def main() -> None:
    what, folder, rank = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE))
    os.environ.update(LOCAL_WORLD_SIZE=str(WORLD_SIZE), LOCAL_SIZE=str(WORLD_SIZE))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")  # required, not used
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD_SIZE
    )
    tool, _, rest = what.partition("-")
    if tool == "zero":
        write_deepspeed(folder, rank, int(rest))
    else:
        write_accelerate(folder, rank, rest)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
