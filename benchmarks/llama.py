"""Blocks of Llama 3 8B and smaller ones, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """Blocks of a model."""

    width: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    num_blocks: int
    seq: int
    batch: int = 1


LLAMA = Shape(4096, 14336, 32, 8, num_blocks=8, seq=4096)
TINY = Shape(64, 96, 4, 2, num_blocks=3, seq=16)


class LlamaBlock(nn.Module):
    """Attention with grouped queries and a gated feed-forward, pre-normalized."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, head = shape.width, shape.width // shape.num_heads
        self.heads = shape.num_heads, shape.num_kv_heads, shape.num_kv_heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, n * head, bias=False) for n in self.heads)
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, seq, width) to the same shape."""
        normed, (batch, seq, width) = self.norm1(x), x.shape
        q, k, v = (
            linear(normed).view(batch, seq, heads, -1).transpose(1, 2)
            for linear, heads in zip((self.q, self.k, self.v), self.heads, strict=True)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, seq, width))
        normed = self.norm2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Sequential):
    """Blocks only; forward returns the mean square of the last block's output."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Maps (batch, seq, width) to a scalar."""
        return super().forward(input).float().square().mean()


def build(shape: Shape, device: torch.device) -> Llama:
    """Builds the blocks in float32 on the device."""
    torch.manual_seed(0)
    with device:
        return Llama(*(LlamaBlock(shape) for _ in range(shape.num_blocks)))
