"""Trains on Ray's workers: `python examples/cluster/ray_train.py` on a machine of the cluster.

Ray starts one process per worker and initialises torch.distributed; fullshard shards the model and
writes checkpoints into a folder that all machines reach. A restart resumes from the newest one.
"""

import sys
from pathlib import Path

import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import fullshard as fs


def train(settings: dict) -> None:
    """Runs on each worker."""
    device = ray.train.torch.get_device()
    torch.manual_seed(0)  # equal weights on every worker
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]).to(device)
    fs.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = 0
    if any(Path(settings["folder"]).glob("step-*")):  # a checkpoint that cannot be read is an error
        first = fs.load(settings["folder"], model, optimizer)["step"]
    rank = torch.distributed.get_rank()
    for step in range(first, settings["steps"]):
        torch.manual_seed(1000 * step + rank)  # different data on every worker
        x = torch.randn(32, 256, device=device)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 10 == 0:
            fs.save(settings["folder"], model, optimizer, step=step + 1)
        ray.train.report({"step": step + 1, "loss": loss.item()})
        if rank == 0:
            print(f"step {step + 1}  loss {loss.item():.4f}")


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/ray").absolute()
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(folder / "checkpoints"), "steps": 20},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(
            storage_path=str(folder), failure_config=FailureConfig(max_failures=2)
        ),
    )
    trainer.fit()
    print(f"checkpoints: {folder / 'checkpoints'}")
