"""One training run as formulas see it: typed, complete, without anything measured.

[Note: a decoder from a few numbers]
What a table has of a model, and what that leaves open:

    block   attention  d x (q + 2 kv) + q x d      mlp  2 or 3 matrices of d x ff
    ends    an embedding of vocab x d, and a head of its own unless it is tied; without a gate there
            may be a table of positions, seq_len x d

Whether the mlp is gated, the head tied, heads wider than d / heads and positions learned is what no
table says: the choice that comes nearest to the stated number of parameters is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from itertools import product

from fullshard.outlook.devices import Device

HEAD_DIM = 128
SPARSE = 1.5  # more parameters than this times what the shapes explain: experts


@dataclass(frozen=True, slots=True)
class Shapes:
    """The numbers of a table; None where it is silent."""

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
    """What the forecast computes with.

    Attributes:
        num_params: All of them.
        layers, width, vocab: Blocks, the residual stream's width, tokens in the vocabulary.
        query_width, kv_width: Of all query heads together, and of all key (or value) heads.
        mlp_width: Inner width of the mlp.
        gated: Its first half has two matrices.
        block_params: Parameters of one block that a token uses.
        head_params: Multiplied with by the head.
        is_tied: The head is the embedding.
        is_sparse: A token uses few of the parameters (experts).
        is_guessed: Shapes were made up from the number of parameters.
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

    @property
    def active_params(self) -> float:
        """Parameters that a token is multiplied with."""
        return self.layers * self.block_params + self.head_params

    def flops_per_token(self, seq_len: int, trained: float = 1.0) -> float:
        """Of a forward and backward, as model FLOPs utilization counts them: nothing twice.

        Args:
            seq_len: Tokens that attend to each other.
            trained: Share of the parameters; the others have no gradients of their own.

        References:
            PaLM, https://arxiv.org/abs/2204.02311, appendix B.
        """
        attention = 12 * self.layers * self.query_width * seq_len
        return (4 + 2 * trained) * self.active_params + attention

    @property
    def end_params(self) -> float:
        """Of the embedding and the head, whichever there are."""
        return min((2 - self.is_tied) * self.head_params, 0.5 * self.num_params)

    @property
    def held_block_params(self) -> float:
        """Parameters of one block as it is held, with all experts."""
        return max(self.block_params, (self.num_params - self.end_params) / self.layers)


def decoder(shapes: Shapes, active_params: float | None = None) -> Architecture:
    """Complete a decoder's shapes.

    Args:
        shapes: What is known; the number of parameters, or layers, width and mlp width, must be.
        active_params: Parameters that a token uses, where that is known of a sparse model.

    Raises:
        ValueError: Neither is there.
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
    elif sparse:  # two experts of those that there are: the habit of the models that tables know
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
    """Shapes of a dense decoder of that size: width = 128 layers, mlp_width = 4 width."""
    size = shapes.num_params or 1.0
    layers = max(4, round((size / (12 * HEAD_DIM**2)) ** (1 / 3)))
    width = max(64, round((size / (12 * layers)) ** 0.5 / 64) * 64)
    return Shapes(
        size, shapes.layers or layers, shapes.width or width, None, None, 4 * width, shapes.vocab
    )


# ---- the run ------------------------------------------------------------------------------------


class Stage(Enum):
    """What of a model's state is cut over ranks; the value is ZeRO's number of the stage."""

    NOTHING = 0
    OPTIMIZER = 1
    GRADIENTS = 2
    PARAMETERS = 3


class Tuning(StrEnum):
    """What is trained."""

    FULL = "full"
    LORA = "lora"  # small matrices beside frozen ones
    QLORA = "qlora"  # the frozen ones in 4 bits


class Metric(StrEnum):
    """Which figure of memory a row reports."""

    ALLOCATED = "allocated"  # by tensors
    ACTIVE = "active"  # by tensors and what the allocator cannot give to others yet
    RESERVED = "reserved"  # by the allocator
    UNKNOWN = "unknown"


class Math(StrEnum):
    """What matmuls compute in."""

    FLOAT32 = "fp32"
    HALF = "half"
    FLOAT8 = "fp8"


class Compiler(StrEnum):
    """What makes kernels of a model's code."""

    NONE = "none"  # they were made before
    TORCH = "torch.compile"
    XLA = "xla"


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How ranks are divided; their product is the world.

    Attributes:
        shard: Ranks that hold one copy of what is cut.
        replicate: Copies of it.
        tensor, context, pipeline: Ranks that compute one sample together.
    """

    shard: int
    replicate: int = 1
    tensor: int = 1
    context: int = 1
    pipeline: int = 1

    @property
    def data_ranks(self) -> int:
        """Groups of ranks with samples of their own."""
        return self.shard * self.replicate

    @property
    def state_ranks(self) -> int:
        """Ranks that state is cut over: parts of one sample are computed with the same weights."""
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
    """What one step takes: tokens a sample, samples a micro-batch, micro-batches a step."""

    seq_len: int
    micro_batch: float
    accumulation: float


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of an element.

    Attributes:
        gather, reduce, master: Of gathered weights, of gradients on the wire, of stored weights.
        math: What matmuls compute in.
        casts_late: Autocast: weights and the residual stream stay as they are stored.
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
        compiler: Compiler of the operations between matmuls.
        recompute: Share of a block's forward that runs again in backward.
        kept: Share of its activations that is kept.
        is_tuned: Attention and norms by kernels of the device's maker (cuDNN, Transformer Engine).
        offloads_activations: To the host.
        by_operation: Attention and every other matmul are kept of all blocks, as torchtitan does.
    """

    recompute: float = 0.0
    kept: float = 1.0
    compiler: Compiler = Compiler.NONE
    is_tuned: bool = False
    offloads_activations: bool = False
    by_operation: bool = False


@dataclass(frozen=True, slots=True)
class Workload:
    """A run.

    Attributes:
        fabric: Bytes a second and device between hosts.
        domain: Devices that the fast link joins.
        state_bytes: The optimizer's, of a trained parameter, in float32 terms.
        updates_in_backward: Gradients are used and dropped one by one.
        offloads: State lives on the host.
        reshards: Gathered blocks are freed after forward.
        saves_whole: The model is gathered on the device to be saved, and the peak counts that:
            FSDP1's habit, where the counter is read after the run.
        cuts_matmuls: Their traffic between tensor-parallel ranks runs beside their parts.
        doubt: What had to be assumed, in words; each widens the interval.
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
        """That one rank's device computes, its share of tensor and context parallelism aside."""
        return self.batch.seq_len * self.batch.micro_batch
