"""Lightning's ModelParallelStrategy: torchrun --nproc-per-node 2 lit.py FOLDER."""

import sys

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, TensorDataset


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        self.losses = []

    def configure_model(self):
        if isinstance(self, FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        for block in self.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self, mesh=mesh)

    def training_step(self, batch, _):
        loss = nn.functional.mse_loss(self.blocks(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_):
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main():
    torch.manual_seed(0)
    net = Net()
    batches = DataLoader(TensorDataset(torch.randn(32, 16), torch.randn(32, 16)), batch_size=4)
    trainer = lightning.Trainer(
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        accelerator="cpu", devices=2, max_epochs=1, default_root_dir=sys.argv[1],
        gradient_clip_val=0.5, enable_progress_bar=False, logger=False,
    )  # fmt: skip
    trainer.fit(net, batches)
    if trainer.is_global_zero:
        print("losses", *net.losses)


if __name__ == "__main__":
    main()
