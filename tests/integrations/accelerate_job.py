"""An Accelerate loop: python accelerate_job.py ddp|sharded FOLDER [FOLDER OF A STATE]."""

import json
import sys
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fullshard.errors import EngineError

MODE, FOLDER, RESUME = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
if MODE == "ddp":
    from accelerate import Accelerator
else:
    from fullshard.integrations.accelerator import ShardedAccelerator as Accelerator


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(40, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16)) for _ in range(3)
        )
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        x = self.words(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    data = torch.randint(0, 40, (54, 7), generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(data), batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if RESUME:
        accelerator.load_state(RESUME[0])
    rows = []
    for epoch in range(1 if RESUME else 0, 2):
        for (x,) in loader:
            with accelerator.accumulate(model):
                scores = model(x[:, :-1])
                loss = nn.functional.cross_entropy(scores.flatten(0, 1), x[:, 1:].flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    rows.append([float(norm), scheduler.get_last_lr()[0]])
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        with torch.no_grad():
            seen = [
                accelerator.gather_for_metrics(model(x).logsumexp(-1).mean(-1)) for (x,) in loader
            ]
        rows.append(torch.cat(seen).tolist())
        if epoch == 0:
            accelerator.save_state(str(FOLDER / f"state-{MODE}"))
    AcceleratorState._reset_state()
    low = Accelerator(cpu=True, mixed_precision="bf16")
    rows.append([low.prepare(Net())(x).dtype.itemsize])  # float32 outside of the model
    assert isinstance(accelerator.unwrap_model(model), Net)
    accelerator.save_model(model, str(FOLDER / f"model-{MODE}"))
    if accelerator.is_main_process:
        name = f"{MODE}-{Path(RESUME[0]).name}" if RESUME else MODE
        (FOLDER / f"{name}.json").write_text(json.dumps(rows))
    if MODE == "sharded" and not RESUME:
        ask_alone(accelerator, model)


def ask_alone(accelerator, model):
    """Writes each rank's result if only rank 0 asks for the state dict."""
    try:
        if accelerator.is_main_process:
            accelerator.get_state_dict(model)
        accelerator.wait_for_everyone()
    except EngineError as error:
        (FOLDER / f"alone-{accelerator.process_index}").write_text(str(error))


if __name__ == "__main__":
    main()
