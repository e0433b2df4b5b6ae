"""One training run as the forecast sees it: typed, complete, without anything measured."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum

from fullshard.outlook.architecture import Architecture
from fullshard.outlook.devices import Device


class Sharding(Enum):
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
class Mesh:
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
class Optimizer:
    """Bytes of state a parameter in float32 terms, and where it is.

    Attributes:
        state_bytes: A trained parameter's.
        in_backward: Gradients are used and dropped one by one.
    """

    state_bytes: float = 8
    in_backward: bool = False


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
        offloads: State lives on the host.
        reshards: Gathered blocks are freed after forward.
        saves_whole: The model is gathered on the device to be saved, and the peak counts that:
            FSDP1's habit, where the counter is read after the run.
        cuts_matmuls: Their traffic between tensor-parallel ranks runs beside their parts.
        doubt: What had to be assumed, in words; each widens the interval.
    """

    model: Architecture
    device: Device
    mesh: Mesh
    sharding: Sharding
    batch: Batch
    precision: Precision
    optimizer: Optimizer
    kernels: Kernels
    tuning: Tuning
    metric: Metric
    fabric: float
    domain: int
    offloads: bool = False
    reshards: bool = True
    saves_whole: bool = False
    cuts_matmuls: bool = False
    doubt: tuple[str, ...] = ()

    @property
    def tokens_per_micro_batch(self) -> float:
        """That one rank's device computes, its share of tensor and context parallelism aside."""
        return self.batch.seq_len * self.batch.micro_batch
