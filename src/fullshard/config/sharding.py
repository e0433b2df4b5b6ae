"""ShardConfig: how a model is sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import (
    BeforeValidator,
    PlainSerializer,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

from fullshard.config.fields import (
    Count,
    Depth,
    Flag,
    Names,
    Rejected,
    Section,
    Text,
    to_names,
    to_number,
)
from fullshard.config.values import (
    PREFETCH_DEPTHS,
    ConfigProblems,
    DType,
    GradReduction,
    GradSync,
    HomeKind,
    Problem,
    Recompute,
    RecomputeKind,
    ReductionKind,
    Strategy,
    TransportKind,
    WrapKind,
    did_you_mean,
    parse,
    parse_recompute,
    spellings,
    words_of,
)

Wrap = WrapKind | tuple[str, ...] | Callable[..., Any]


class Offload(Section):
    """The memory of each kind of state between uses; None: the device."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "params": "parameters",
        "grads": "gradients",
        "optim": "optimizer",
    }

    parameters: HomeKind | None = None
    """Master parameters. cpu: copied to the device before every gather. nvme: read unit by unit."""

    gradients: HomeKind | None = None
    """Reduced gradients. They are copied to the host or to nvme after every reduction."""

    optimizer: HomeKind | None = None
    """Optimizer state; the optimizer then runs on the host. With nvme, states made by
    `torch.zeros_like(parameter)`, such as AdamW's, are on nvme, and others on the host."""

    folder: Text | None = None
    """Folder for the unnamed files of nvme. None: the system's temporary folder."""

    @model_validator(mode="after")
    def _has_use_of_its_folder(self) -> Self:
        homes = (self.parameters, self.gradients, self.optimizer)
        if self.folder is not None and HomeKind.NVME not in homes:
            advice = "Set parameters, gradients or optimizer to nvme, or leave folder out"
            raise ConfigProblems([Problem("folder", "", "no effect without nvme", advice)])
        return self


def _read_wrap(value: object) -> object:
    """`auto`, `transformer`, `size`, `none`, class names, classes, or a callable.

    A single word is a class name if it is written like one (`LlamaDecoderLayer`); `transfomer` is a
    misspelled kind. A class whose name is a kind (`Transformer`) needs a list: `[Transformer]`.
    """
    if isinstance(value, WrapKind):
        return value
    if isinstance(value, type):
        return (value.__name__,)
    if isinstance(value, str | bool):
        for word in words_of(value):
            if word in spellings(WrapKind):
                return spellings(WrapKind)[word]
        names = to_names(str(value))
        if names and all(n.isidentifier() and n[0].isupper() and not n.isupper() for n in names):
            return names
    elif callable(value):
        return value
    elif isinstance(value, list | tuple | set | frozenset):
        members = cast("Iterable[object]", value)
        names = tuple(m.__name__ if isinstance(m, type) else str(m).strip() for m in members)
        if names and all(name.isidentifier() for name in names):
            return names
    raise Rejected(
        "one of auto, transformer, size, none, or class names, or a callable",
        did_you_mean(cast("object", value), spellings(WrapKind)),
    )


def _write_wrap(value: Wrap) -> object:
    if isinstance(value, WrapKind):
        return value.value
    if isinstance(value, tuple):
        return list(cast("tuple[str, ...]", value))
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return f"<callable {getattr(value, '__module__', '?')}.{name}>"


def _read_strategies(value: object) -> tuple[tuple[str, Strategy], ...]:
    """Reads a mapping of module names (globs) to strategies as pairs, which are hashable."""
    pairs = cast("Mapping[object, object]", value).items() if isinstance(value, Mapping) else value
    pairs = list(cast("Iterable[object]", pairs)) if isinstance(pairs, Iterable) else [pairs]
    if not all(isinstance(p, tuple | list) and len(cast("list[object]", p)) == 2 for p in pairs):
        raise Rejected("a mapping of module names (globs) to strategies")
    return tuple(
        (str(glob), parse(Strategy, strategy, str(glob)))
        for glob, strategy in cast("list[tuple[object, object]]", pairs)
    )


def _read_depth(value: object) -> object:
    """Reads a depth, a flag of FSDP1's `forward_prefetch`, or a member of its `BackwardPrefetch`.

    BACKWARD_PRE gathers the next unit before this unit's gradients are computed, so two units are
    gathered at once: depth 1. BACKWARD_POST gathers it afterwards, when this unit's slot is free,
    which is depth 0: the reduction of this unit overlaps with the next gather. NO_PREFETCH and null
    are also depth 0.
    """
    if value is None:
        return 0
    if to_number(value) is not None:
        return value
    for word in words_of(value):
        if word in PREFETCH_DEPTHS:
            return PREFETCH_DEPTHS[word]
    raise Rejected(
        "an integer >= 0, or one of backward_pre, backward_post, no_prefetch",
        did_you_mean(value, PREFETCH_DEPTHS),
    )


def _read_offload(value: object) -> object:
    """Reads `cpu` or true for all three kinds of state, or a mapping of them."""
    if value is None or value is False or isinstance(value, Offload):
        return value or None
    if isinstance(value, Mapping):
        return cast("Mapping[str, object]", value)
    if isinstance(value, str) and words_of(value)[0] in ("none", "no", "false"):
        return None
    try:
        home = HomeKind.CPU if value is True else parse(HomeKind, value, "")
    except ConfigProblems as error:
        raise Rejected(
            "one of cpu, nvme, or a mapping of parameters, gradients, optimizer to these",
            error.problems[0].advice,
        ) from None
    return Offload(parameters=home, gradients=home, optimizer=home)


PrefetchDepth = Annotated[Depth, BeforeValidator(_read_depth)]

_WRAP_SCHEMA = {
    "anyOf": [
        {"enum": [kind.value for kind in WrapKind]},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
    ]
}


class ShardConfig(Section):
    """How a model is sharded: strategy, mesh, units, dtypes, communication."""

    strategy: Strategy = Strategy.FULL_SHARD
    """full_shard (ZeRO-3) | shard_grad_op (ZeRO-2) | no_shard (DDP) | hybrid_shard |
    hybrid_shard_zero2 | auto (the planner chooses, where a batch is known)."""

    strategies: Annotated[
        tuple[tuple[str, Strategy], ...],
        PlainValidator(_read_strategies),
        PlainSerializer(dict),
        WithJsonSchema({"type": "object", "additionalProperties": {"enum": list(Strategy)}}),
    ] = ()
    """Strategies of single units, by module name (globs); the last match counts. All units have the
    same mesh. Sharded units differ in when slots are released; no_shard replicates over all
    ranks."""

    replicate: Count | None = None
    """Number of copies of each shard. None: hybrid strategies replicate over hosts, all others keep
    one copy."""

    shard: Count | None = None
    """Number of ranks that share one copy. None: hybrid strategies shard inside a host, all others
    over all ranks. replicate x shard x context x expert x tensor is the world size."""

    context: Count = 1
    """Number of ranks that divide the sequences of shared samples; attention exchanges heads for
    tokens (Ulysses). Parameters are sharded over these ranks too."""

    tensor: Count = 1
    """Number of neighbouring ranks that share a batch and divide the layers' matrices by the
    model's own tensor-parallel plan (transformers)."""

    expert: Count = 1
    """Number of ranks, or of groups of `tensor` ranks, that store different experts and exchange
    tokens; each has its own batch. Other parameters are sharded over these ranks too."""

    wrap: Annotated[
        Wrap,
        PlainValidator(_read_wrap),
        PlainSerializer(_write_wrap),
        WithJsonSchema(_WRAP_SCHEMA),
    ] = WrapKind.AUTO
    """Which modules are units (gathered and freed together): auto (the repeated blocks) |
    transformer | size | none (one unit) | class names | a callable of Python."""

    wrap_min_params: Count = 100_000_000
    """Number of parameters of the smallest unit, for wrap: size."""

    ignore: Names = ()
    """Module or parameter names (globs) that are neither sharded nor reduced."""

    fp32_modules: Names = ()
    """Module names (globs) that compute in float32, whatever param_dtype is."""

    master_dtype: DType | None = None
    """Dtype of shards and optimizer steps. None: float64 stays float64, all others float32."""

    param_dtype: DType | None = None
    """Dtype in which units are gathered and compute. None: the master's."""

    reduce_dtype: DType | None = None
    """Dtype of gradient reductions. None: float32 (float64 for float64 masters)."""

    buffer_dtype: DType | None = None
    """Dtype of floating point buffers. None: untouched."""

    output_dtype: DType | None = None
    """Dtype of the model's outputs. None: untouched."""

    grad_reduction: GradReduction = GradReduction.MEAN
    """mean | sum of the ranks' gradients."""

    reduction: ReductionKind = ReductionKind.NATIVE
    """Sums of gradients over c10d. native: by the backend, in `reduce_dtype`. ordered: by each
    rank, in rank order and in float32, bit-identical to the other transports; receives whole
    gradient slots, and sends more between hosts. auto: ordered for 16-bit gradients of more than 8
    ranks, otherwise native."""

    forward_prefetch: PrefetchDepth = 1
    """Number of units gathered ahead in forward; each needs the memory of one gathered unit."""

    backward_prefetch: PrefetchDepth = 1
    """Number of units gathered ahead in backward, or one of FSDP1's words (BACKWARD_PRE: 1)."""

    offload: Annotated[Offload | None, BeforeValidator(_read_offload)] = None
    """None | cpu | nvme | a table {parameters, gradients, optimizer, folder} of these."""

    activation_checkpointing: Annotated[
        Recompute,
        PlainValidator(parse_recompute),
        PlainSerializer(str),
        WithJsonSchema({"type": "string", "pattern": "^(none|block|selective|offload|every_.+)$"}),
    ] = Recompute(RecomputeKind.NONE)
    """none | block | selective | every_2, every_3 ... | offload: activations that are dropped in
    forward and computed again in backward."""

    grad_sync: GradSync = GradSync.EVERY_MICRO_BATCH
    """every_micro_batch (least memory) | last_micro_batch (least traffic; unsharded gradients stay
    in memory) | last_micro_batch_outer (only the replicate axis waits)."""

    transport: TransportKind = TransportKind.AUTO
    """Transport between ranks: auto | c10d | direct | shared | fake."""

    symmetric_memory: Flag = False
    """Allocate slots in NCCL's symmetric memory, which its copy engines and fast kernels need."""

    poison: Flag = False
    """Fill every slot with NaN when it is released, so that a missed gather is visible. For tests
    and `verify`; costs one write of every gathered parameter."""

    def without(self, other: Literal["context", "expert"]) -> ShardConfig:
        """Returns the same mesh for parameters that an axis does not cut.

        They are sharded, or replicated, over its ranks.
        """
        axis = "replicate" if self.strategy is Strategy.NO_SHARD else "shard"
        size: int | None = getattr(self, axis)
        return self.model_copy(update={other: 1, axis: size and size * getattr(self, other)})

    def num_batches(self, world_size: int) -> int:
        """Number of batches at a time; ranks of the context and tensor axes share one."""
        return max(1, world_size // (self.context * self.tensor))
