"""Small models for parity tests, their data and their losses; imports nothing of fullshard.

Every weight is perturbed, because ones and zeros hide faults: a norm's weight that was never
gathered looks right while all of its elements are one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from support.sizes import sizes_of

Batch = dict[str, torch.Tensor]
WIDTH = 12  # width of the chains
VOCABULARY = 96


@dataclass(frozen=True)
class Case:
    """A model and its training data.

    Attributes:
        build: Builds the model, equal in every process.
        batch: Arguments of forward, by step and rank.
        loss: Local loss of forward's output.
        blocks: Class names of its blocks.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    loss: Callable[[Any], torch.Tensor]
    blocks: tuple[str, ...]

    def work(self, model: nn.Module, step: int, rank: int, **options: Any) -> torch.Tensor:
        """Runs forward, with more arguments than the batch, and backward; returns the loss."""
        return backward_of(self.loss(model(**self.batch(step, rank), **options)))


def backward_of(loss: torch.Tensor) -> torch.Tensor:
    """Runs backward; returns the loss without its graph."""
    loss.backward()
    return loss.detach()


def perturbed(model: nn.Module, scale: float = 0.1, seed: int = 1) -> nn.Module:
    """Sets training mode and adds noise to all weights (tied ones once)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            param.add_(scale * noise.to(param.dtype))
    return model.train()


def generator_of(step: int, rank: int) -> torch.Generator:
    """Returns the random generator of one batch."""
    return torch.Generator().manual_seed(1000 * step + rank + 7)


# ---- language models -----------------------------------------------------------------------------


def tokens(step: int, rank: int) -> Batch:
    """Returns (2, 9) token ids, as input and as labels."""
    ids = torch.randint(0, VOCABULARY, (2, 9), generator=generator_of(step, rank))
    return {"input_ids": ids, "labels": ids}


def loss_of_output(output: Any) -> torch.Tensor:
    """Returns the loss that a Hugging Face model computes."""
    return output.loss


def hugging_face(model_type: str, **fields: Any) -> nn.Module:
    """Builds a causal language model with random weights in float64."""
    import transformers

    torch.manual_seed(0)
    common = {"hidden_size": 32, "vocab_size": VOCABULARY, "num_attention_heads": 4}
    config = transformers.AutoConfig.for_model(model_type, **{**common, **fields})
    return perturbed(transformers.AutoModelForCausalLM.from_config(config).double())


LLAMA = {
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "use_cache": False,
}


# Sizes of a run; no axis divides them evenly.
ODD_LLAMA = sizes_of(36, 55, 3, 3, layers=2, model_type="llama", vocab_size=127)


def llama() -> nn.Module:
    """Three layers; embedding and head are each smaller than a block."""
    return hugging_face("llama", **LLAMA)


def tied_llama() -> nn.Module:
    """The head shares the embedding's weight."""
    return hugging_face("llama", **LLAMA, tie_word_embeddings=True)


def large_ends_llama() -> nn.Module:
    """Embedding and head are larger than a block, so wrap=auto makes them units."""
    return hugging_face("llama", **{**LLAMA, "intermediate_size": 8, "vocab_size": 400})


def mixture() -> nn.Module:
    """A mixture of experts; the router's auxiliary loss adds a gradient to every block."""
    return hugging_face(
        "qwen3_moe",
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
        experts_implementation="eager",
        use_cache=False,
    )


def t5() -> nn.Module:
    """The first block of each stack computes a position bias, which all others return unchanged."""
    import transformers

    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=3,
        num_heads=4,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return perturbed(transformers.T5ForConditionalGeneration(config).double())


def albert() -> nn.Module:
    """One layer, called four times per forward."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AlbertConfig(
        vocab_size=VOCABULARY,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return perturbed(transformers.AlbertForMaskedLM(config).double())


# ---- a convolutional net -------------------------------------------------------------------------


class Residual(nn.Module):
    """Two convolutions and a shortcut; odd numbers of channels, two kinds of norm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, 11, 3, padding=1)
        self.norm = nn.GroupNorm(1, 11)
        self.second = nn.Conv2d(11, channels, 3, padding=1, bias=False)
        self.batch_norm = nn.BatchNorm2d(channels)
        self.gain = nn.Parameter(torch.ones(()))  # zero-dimensional

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.silu(self.norm(self.first(images)))
        return images + self.gain * self.batch_norm(self.second(hidden))


class ConvNet(nn.Module):
    """A stem, three residual blocks, one of them depthwise upsampled, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 7, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(Residual(7) for _ in range(3))
        self.up = nn.ConvTranspose2d(7, 5, 2, stride=2, groups=1)
        self.classify = nn.Linear(5, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(images)
        for block in self.blocks:
            hidden = block(hidden)
        scores = self.classify(self.up(hidden).mean((2, 3)))
        return nn.functional.cross_entropy(scores, labels)


def conv_net() -> nn.Module:
    torch.manual_seed(0)
    return perturbed(ConvNet().double())


def images(step: int, rank: int) -> Batch:
    """Returns four images of 8 x 8 and their classes."""
    generator = generator_of(step, rank)
    pixels = torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float64)
    return {"images": pixels, "labels": torch.randint(0, 10, (4,), generator=generator)}


# ---- chains: blocks called in any order ----------------------------------------------------------


class Block(nn.Module):
    """A residual block whose backward needs its weights and its norm's weights."""

    def __init__(self, width: int = WIDTH, hidden: int = 19) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Chain(nn.Module):
    """Blocks in the order given by each call, between a stem and a head.

    Args:
        num_blocks: Number of blocks.
        order: Blocks to call, in order; None: each once, as registered.
    """

    def __init__(self, num_blocks: int = 4, order: Sequence[int] | None = None) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 3)
        self.order = tuple(range(num_blocks) if order is None else order)

    def forward(
        self, x: torch.Tensor, *, order: Sequence[int] | None = None, states: bool = False
    ) -> Any:
        hidden, seen = self.stem(x), []
        for index in self.order if order is None else order:
            hidden = self.blocks[index](hidden)
            seen.append(hidden)
        scores = self.head(hidden)
        return (scores, seen) if states else scores


def chain(num_blocks: int = 4, order: Sequence[int] | None = None) -> nn.Module:
    torch.manual_seed(0)
    return perturbed(Chain(num_blocks, order).double())


def vectors(step: int, rank: int) -> Batch:
    """Returns (5, WIDTH) random vectors."""
    generator = generator_of(step, rank)
    return {"x": torch.randn(5, WIDTH, generator=generator, dtype=torch.float64)}


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


CASES = {
    "llama": Case(llama, tokens, loss_of_output, ("LlamaDecoderLayer",)),
    "tied llama": Case(tied_llama, tokens, loss_of_output, ("LlamaDecoderLayer",)),
    "llama with large ends": Case(large_ends_llama, tokens, loss_of_output, ("LlamaDecoderLayer",)),
    "mixture of experts": Case(mixture, tokens, loss_of_output, ("Qwen3MoeDecoderLayer",)),
    "convolutional net": Case(conv_net, images, lambda loss: loss, ("Residual",)),
    "t5": Case(t5, tokens, loss_of_output, ("T5Block",)),
    "albert": Case(albert, tokens, loss_of_output, ("AlbertLayer",)),
    "chain": Case(chain, vectors, mean_square, ("Block",)),
}
CHAIN = CASES["chain"]


def float32_model(name: str) -> nn.Module:
    """Returns a case's model in float32."""
    return CASES[name].build().float()


def float32_batch(name: str, step: int, rank: int, dtype: torch.dtype = torch.float32) -> Batch:
    """Returns a case's batch in float32, which the engine casts, or in another dtype."""
    made = CASES[name].batch(step, rank)
    return {key: v.to(dtype) if v.is_floating_point() else v for key, v in made.items()}


def float32_case(name: str) -> Case:
    """A case whose sums round, so that a different order of sums is visible."""
    build, batch = partial(float32_model, name), partial(float32_batch, name)
    return replace(CASES[name], build=build, batch=batch)
