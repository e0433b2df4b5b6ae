"""A training loop with Accelerate: torchrun --nproc-per-node 2 loop.py FOLDER."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = TensorDataset(torch.randn(64, 16), torch.randint(4, (64,)))
    batches = DataLoader(rows, batch_size=4, shuffle=True)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    losses = []
    for inputs, labels in batches:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather_for_metrics(loss.detach().view(1)).mean().item())
    accelerator.save_state(sys.argv[1])
    accelerator.print("losses", *losses)


if __name__ == "__main__":
    main()
