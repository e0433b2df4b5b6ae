"""Lightning's Trainer: python lightning_job.py torch|sharded FOLDER files|file [RESUME]."""

import json
import sys
from pathlib import Path

import lightning as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MODE, FOLDER, FORM, RESUME = sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4:]
if MODE == "torch":
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard
else:
    from fullshard.compat.fsdp2 import fully_shard
    from fullshard.integrations.lightning import ModelParallelStrategy


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(40, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16)) for _ in range(3)
        )
        self.head = nn.Linear(16, 40)
        self.double()
        self.rows = []

    def configure_model(self):
        if isinstance(self, torch.distributed.fsdp.FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        for block in self.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self, mesh=mesh)

    def forward(self, tokens):
        x = self.words(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def loss(self, tokens):
        scores = self(tokens[:, :-1])
        return nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch, _):
        loss = self.loss(batch[0])
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, _):
        self.log("val_loss", self.loss(batch[0]), sync_dist=True)

    def on_before_optimizer_step(self, optimizer):
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters()])
        self.rows.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))

    def on_validation_epoch_end(self):
        self.rows += [float(value) for _, value in sorted(self.trainer.callback_metrics.items())]

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return [optimizer], [scheduler]


def main():
    torch.manual_seed(0)
    net = Net()
    data = torch.randint(0, 40, (48, 7), generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(data), batch_size=4)
    held = DataLoader(TensorDataset(data[:16]), batch_size=4)
    here = FOLDER / f"{MODE}-{FORM}"
    keep = ModelCheckpoint(here, filename="{epoch}", save_top_k=-1)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, max_epochs=2, accumulate_grad_batches=2,
        strategy=ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1,
            save_distributed_checkpoint=FORM == "files",
        ),
        gradient_clip_val=0.5, callbacks=[keep], logger=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(net, loader, held, ckpt_path=RESUME[0] if RESUME else None, weights_only=False)
    seen = trainer.validate(net, held, verbose=False)
    if trainer.global_rank == 0:
        name = f"{MODE}-{FORM}" + (f"-{Path(RESUME[0]).parent.name}" if RESUME else "")
        rows = [*net.rows, seen[0]["val_loss"]]
        (FOLDER / f"{name}.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
