"""The models of the benchmarks: plain GPTs that need only torch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from fullshard.bench.cases import ADAPTER_RANK, NUM_CHOSEN, NUM_EXPERTS, Case, Kind

HEAD_WIDTH = 64


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (..., width) to the same shape."""
        return self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    """Feed-forwards of which a learned router selects a few per token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList([FeedForward(width) for _ in range(NUM_EXPERTS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (..., width) to the same shape; the number of tokens per expert depends on the data.

        An expert without tokens multiplies an empty matrix, so that its gradient is zero, not
        absent. Otherwise ranks would reduce different sets of parameters.
        """
        tokens = x.flatten(0, -2)
        scores, chosen = self.router(tokens).topk(NUM_CHOSEN, dim=-1)
        shares = scores.softmax(-1)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            share = shares[rows, places].unsqueeze(-1)
            mixed = mixed.index_add(0, rows, share * expert(tokens[rows]))
        return mixed.view_as(x)


class Adapted(nn.Module):
    """A frozen linear layer plus the product of two narrow trained ones."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        assert isinstance(base, nn.Linear)
        self.base = base
        self.narrow = nn.Linear(base.in_features, ADAPTER_RANK, bias=False)
        self.widen = nn.Linear(ADAPTER_RANK, base.out_features, bias=False)
        nn.init.zeros_(self.widen.weight)  # training starts at the base model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (..., in_features) to (..., out_features)."""
        return self.base(x) + self.widen(self.narrow(x))


class Block(nn.Module):
    """Attention and feed-forward with pre-normalization: the unit that every engine shards."""

    def __init__(self, width: int, kind: Kind = "gpt") -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.qkv: nn.Module = nn.Linear(width, 3 * width)
        self.out: nn.Module = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.feed_forward = Experts(width) if kind == "moe" else FeedForward(width)
        self.num_heads = max(1, width // HEAD_WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, seq, width) to the same shape."""
        batch, seq, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, seq, 3, self.num_heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return x + self.feed_forward(self.norm2(x))


class GPT(nn.Module):
    """Embedding, blocks, norm, head; forward returns the loss."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embed = nn.Embedding(case.vocab, case.width)
        self.blocks = nn.ModuleList([Block(case.width, case.kind) for _ in range(case.layers)])
        self.norm = nn.LayerNorm(case.width)
        self.head = nn.Linear(case.width, case.vocab, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the mean cross-entropy of `labels`, both (batch, seq)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        # A loss in bfloat16 has three digits: too few to tell two engines apart.
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def add_adapters(model: GPT) -> None:
    """Freezes the model and adds trained adapters to the attention of every block."""
    model.requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.qkv = Adapted(block.qkv)
        block.out = Adapted(block.out)


def build_model(case: Case, seed: int) -> GPT:
    """Builds the model with the same weights in every process."""
    torch.manual_seed(seed)
    model = GPT(case)
    if case.kind == "lora":
        add_adapters(model)
    return model


def make_batches(case: Case, rank: int, num_batches: int) -> list[tuple[torch.Tensor, ...]]:
    """Draws this rank's batches, which differ so that a missing reduction shows."""
    generator = torch.Generator().manual_seed(1000 + rank)
    shape = (2, case.batch, case.seq)
    return [
        tuple(torch.randint(0, case.vocab, shape, generator=generator).unbind(0))
        for _ in range(num_batches)
    ]
