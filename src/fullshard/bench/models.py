"""The model of the benchmarks: a plain GPT, so that nothing but torch is measured."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from fullshard.bench.cases import Case

HEAD_WIDTH = 64


class Block(nn.Module):
    """Attention and feed-forward with pre-normalization: the unit that every engine shards."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.num_heads = max(1, width // HEAD_WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, seq, width) to the same shape."""
        batch, seq, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, seq, 3, self.num_heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Embedding, blocks, norm, head; forward returns the loss."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embed = nn.Embedding(case.vocab, case.width)
        self.blocks = nn.ModuleList([Block(case.width) for _ in range(case.layers)])
        self.norm = nn.LayerNorm(case.width)
        self.head = nn.Linear(case.width, case.vocab, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the mean cross-entropy of `labels`, both (batch, seq)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build_model(case: Case, seed: int) -> GPT:
    """Builds the model with the same weights in every process."""
    torch.manual_seed(seed)
    return GPT(case)


def make_batches(case: Case, rank: int, num_batches: int) -> list[tuple[torch.Tensor, ...]]:
    """Draws this rank's batches; equal ones would hide a missing reduction."""
    generator = torch.Generator().manual_seed(1000 + rank)
    shape = (2, case.batch, case.seq)
    return [
        tuple(torch.randint(0, case.vocab, shape, generator=generator).unbind(0))
        for _ in range(num_batches)
    ]
