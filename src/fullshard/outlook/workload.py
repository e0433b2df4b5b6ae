"""The inputs of the formulas for time and memory: a training run in numbers.

[Note: a decoder from a few numbers]
A table usually has these numbers of a model:

    block   attention  d x (q + 2 kv) + q x d      mlp  2 or 3 matrices of d x ff
    ends    an embedding of vocab x d, and a head unless it is tied; without a gate possibly a
            table of positions, seq_len x d

Tables do not show whether the mlp is gated, the head is tied, heads are wider than d / heads, or
positions are learned. The choice that is closest to the stated number of parameters is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from itertools import product

from fullshard.outlook.devices import Device

HEAD_DIM = 128
SPARSE = 1.5  # a model with more parameters than this times those of its shapes has experts


@dataclass(frozen=True, slots=True)
class Shapes:
    """Numbers of a model; None if unknown."""

    num_params: float | None
    layers: int | None
    width: int | None
    heads: int | None
    kv_heads: int | None
    mlp_width: int | None
    vocab: int | None
    seq_len: int | None = None


@dataclass(frozen=True, slots=True)
class Architecture:
    """The complete shapes of a decoder.

    Attributes:
        num_params: Number of parameters.
        layers, width, vocab: Number of blocks, width of the residual stream, vocabulary size.
        query_width, kv_width: Width of all query heads together, and of all key (or value) heads.
        mlp_width: Inner width of the mlp.
        gated: Whether the first layer of the mlp has two matrices.
        block_params: Parameters of one block that a token uses.
        head_params: Parameters of the head.
        is_tied: Whether the head is the embedding.
        is_sparse: Whether a token uses a part of the parameters (experts).
        is_guessed: Whether the shapes were derived from the number of parameters.
        expert_params: Parameters of all experts; 0 if unknown.
        chosen: Experts that a token uses in a block.
    """

    num_params: float
    layers: int
    width: int
    vocab: int
    query_width: int
    kv_width: int
    mlp_width: int
    gated: bool
    block_params: float
    head_params: float
    is_tied: bool = False
    is_sparse: bool = False
    is_guessed: bool = False
    expert_params: float = 0.0
    chosen: int = 0

    @property
    def active_params(self) -> float:
        """Parameters that a token uses in matmuls."""
        return self.layers * self.block_params + self.head_params

    def flops_per_token(self, seq_len: int, trained: float = 1.0) -> float:
        """Returns the operations of a forward and backward, without recompute.

        Args:
            seq_len: Tokens per sequence.
            trained: Trained share of the parameters.

        References:
            PaLM, https://arxiv.org/abs/2204.02311, appendix B.
        """
        attention = 12 * self.layers * self.query_width * seq_len
        return (4 + 2 * trained) * self.active_params + attention

    @property
    def end_params(self) -> float:
        """Parameters of the embedding and the head."""
        return min((2 - self.is_tied) * self.head_params, 0.5 * self.num_params)

    @property
    def held_block_params(self) -> float:
        """Parameters of one block, with all experts."""
        return max(self.block_params, (self.num_params - self.end_params) / self.layers)


def decoder(shapes: Shapes, active_params: float | None = None) -> Architecture:
    """Completes a decoder's shapes.

    Args:
        shapes: The known shapes: at least the number of parameters, or layers, width and mlp width.
        active_params: Parameters that a token uses, if known.

    Raises:
        ValueError: Too little is known.
    """
    known = shapes.layers and shapes.width and shapes.mlp_width
    if not known and not shapes.num_params:
        raise ValueError("expected params_b, or n_layers, d_model and d_ff; got neither")
    guessed = not known
    if guessed:
        shapes = _typical(shapes)
    layers, width, mlp = shapes.layers or 1, shapes.width or 1, shapes.mlp_width or 1
    vocab = shapes.vocab or 50_000
    heads = shapes.heads or max(1, width // HEAD_DIM)
    kv_share = (shapes.kv_heads or heads) / heads
    query_widths = {float(width), float(heads * HEAD_DIM)}

    best: tuple[float, float, float, int, bool, bool] | None = None
    tables = (0, shapes.seq_len or 0)
    choices = product(sorted(query_widths), (True, False), (True, False), tables)
    for query, gated, tied, positions in choices:
        if gated and positions:
            continue
        block = 2 * width * query * (1 + kv_share) + (2 + gated) * width * mlp
        total = layers * block + ((2 - tied) * vocab + positions) * width
        target = shapes.num_params or total
        miss = abs(total / target - 1) + 0.02 * (query != width)
        if best is None or miss < best[0]:
            best = (miss, block, total, int(query), gated, tied)
    assert best is not None, "there is always a choice"
    _, block, total, query_width, gated, tied = best
    num_params = shapes.num_params or total
    sparse = num_params > SPARSE * total and not guessed
    if active_params is not None and active_params < num_params:
        block, sparse = max(active_params - vocab * width, 0.5 * active_params) / layers, True
    elif sparse:  # two experts per token, as in most sparse models of the tables
        block += (2 + gated) * width * mlp
    return Architecture(
        num_params=num_params,
        layers=layers,
        width=width,
        vocab=vocab,
        query_width=query_width,
        kv_width=int(query_width * kv_share),
        mlp_width=mlp,
        gated=gated,
        block_params=block,
        head_params=float(vocab * width),
        is_tied=tied,
        is_sparse=sparse,
        is_guessed=guessed,
    )


def _typical(shapes: Shapes) -> Shapes:
    """Shapes of a dense decoder of this size: width = 128 x layers, mlp_width = 4 x width."""
    size = shapes.num_params or 1.0
    layers = max(4, round((size / (12 * HEAD_DIM**2)) ** (1 / 3)))
    width = max(64, round((size / (12 * layers)) ** 0.5 / 64) * 64)
    return Shapes(
        size, shapes.layers or layers, shapes.width or width, None, None, 4 * width, shapes.vocab
    )


# ---- the run ------------------------------------------------------------------------------------


class Stage(Enum):
    """The sharded part of a model's state; the value is the stage of ZeRO."""

    NOTHING = 0
    OPTIMIZER = 1
    GRADIENTS = 2
    PARAMETERS = 3


class Tuning(StrEnum):
    """The trained parameters."""

    FULL = "full"
    LORA = "lora"  # adapters of a frozen model
    QLORA = "qlora"  # the frozen model is quantized to 4 bits


class Metric(StrEnum):
    """Which memory figure a row of a table reports."""

    ALLOCATED = "allocated"  # bytes of tensors
    ACTIVE = "active"  # and of blocks that are still in use by a stream
    RESERVED = "reserved"  # bytes of the allocator's segments
    UNKNOWN = "unknown"


class Math(StrEnum):
    """Dtype class of matmuls."""

    FLOAT32 = "fp32"
    HALF = "half"
    FLOAT8 = "fp8"


class Compiler(StrEnum):
    """The compiler of a model's code."""

    NONE = "none"  # eager kernels
    TORCH = "torch.compile"
    XLA = "xla"


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Sizes of all axes of parallelism; their product is the world size.

    Attributes:
        shard: Ranks that share one copy of the sharded state.
        replicate: Number of copies.
        tensor, context, pipeline: Ranks that compute one sample together.
        expert: Ranks among those of other samples that divide the experts.
        is_partial: The tensor axis leaves norms, residuals and the head whole, as in our runs.
    """

    shard: int
    replicate: int = 1
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    is_partial: bool = False

    @property
    def data_ranks(self) -> int:
        """Number of ranks, or groups of ranks, with different samples."""
        return self.shard * self.replicate

    @property
    def state_ranks(self) -> int:
        """Ranks that state is sharded over; context ranks share the weights."""
        return self.shard * self.context

    @property
    def world_size(self) -> int:
        return self.data_ranks * self.model_ranks

    @property
    def model_ranks(self) -> int:
        """Ranks that share a sample's work."""
        return self.tensor * self.context * self.pipeline


@dataclass(frozen=True, slots=True)
class Batch:
    """Batch of one rank: tokens per sample, samples per micro-batch, micro-batches per step."""

    seq_len: int
    micro_batch: float
    accumulation: float


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes per element.

    Attributes:
        gather, reduce, master: Gathered weights, gradients in reductions, stored weights.
        math: Dtype class of matmuls.
        casts_late: Autocast, which keeps weights and the residual stream in the stored dtype.
    """

    gather: float = 2
    reduce: float = 4
    master: float = 4
    math: Math = Math.HALF
    casts_late: bool = False


@dataclass(frozen=True, slots=True)
class Kernels:
    """How a block is computed.

    Attributes:
        recompute: Share of a block's forward that is recomputed in backward.
        kept: Share of its activations that is kept.
        compiler: Compiler of the operations between matmuls.
        is_tuned: Attention and norms use the vendor's kernels (cuDNN, Transformer Engine).
        offloads_activations: Saved activations are on the host.
        by_operation: Selective recompute keeps attention and every other matmul, as in torchtitan.
    """

    recompute: float = 0.0
    kept: float = 1.0
    compiler: Compiler = Compiler.NONE
    is_tuned: bool = False
    offloads_activations: bool = False
    by_operation: bool = False


@dataclass(frozen=True, slots=True)
class Workload:
    """A training run.

    Attributes:
        fabric: Bytes per second and device between hosts.
        domain: Number of devices that the fast link joins.
        state_bytes: Bytes of optimizer state per trained parameter, for a float32 master.
        updates_in_backward: Gradients are applied and freed one by one.
        offloads: State is on the host.
        reshards: Gathered blocks are freed after forward.
        saves_whole: The reported peak includes gathering the model on the device to save it, as
            FSDP1 does.
        cuts_matmuls: Tensor parallel communication overlaps with split matmuls.
        doubt: Names of the values that were assumed; each widens the interval.
    """

    model: Architecture
    device: Device
    mesh: Parallelism
    sharding: Stage
    batch: Batch
    precision: Precision
    kernels: Kernels
    fabric: float
    domain: int
    state_bytes: float = 8
    updates_in_backward: bool = False
    tuning: Tuning = Tuning.FULL
    metric: Metric = Metric.RESERVED
    offloads: bool = False
    reshards: bool = True
    saves_whole: bool = False
    cuts_matmuls: bool = False
    doubt: tuple[str, ...] = ()

    @property
    def tokens_per_micro_batch(self) -> float:
        """Tokens per micro-batch of a group of ranks that share samples."""
        return self.batch.seq_len * self.batch.micro_batch
