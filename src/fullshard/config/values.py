"""The words of a configuration: enums, and every spelling of other tools that means one of them.

Text becomes an enum here, once; inside fullshard, code matches on enums. A spelling is compared
without regard to case, and `-` counts as `_`. A dotted value counts by its last part, so that
`torch.bfloat16`, `ShardingStrategy.FULL_SHARD` and the objects that print like this are words too.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import NamedTuple, TypeVar

from fullshard.config.problems import ConfigProblems, Problem, show


class Strategy(StrEnum):
    """What every rank keeps of each kind of state between uses."""

    FULL_SHARD = "full_shard"  # ZeRO-3: parameters, gradients, optimizer state sharded
    SHARD_GRAD_OP = "shard_grad_op"  # ZeRO-2: parameters stay gathered from forward to backward
    NO_SHARD = "no_shard"  # DDP: every rank holds everything
    HYBRID_SHARD = "hybrid_shard"  # full_shard inside a host, copies across hosts
    HYBRID_SHARD_ZERO2 = "hybrid_shard_zero2"  # shard_grad_op inside a host, copies across hosts
    AUTO = "auto"  # the planner chooses, where a batch is known


class DType(StrEnum):
    """A floating point dtype, under torch's name."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Transport(StrEnum):
    """Who moves the bytes of gathers and reductions."""

    AUTO = "auto"
    C10D = "c10d"  # torch's own collectives, in place
    DIRECT = "direct"  # gloo: each rank sends each peer just the slice that it needs
    SHARED = "shared"  # ranks of one host map one master copy
    FAKE = "fake"  # any world size in one process, nothing moves


class GradReduction(StrEnum):
    """What the gradients of the ranks become: their mean (as DDP and FSDP) or their sum."""

    MEAN = "mean"
    SUM = "sum"


class Reduction(StrEnum):
    """In which order c10d adds: its own (fast), or rank order (the bits of other transports)."""

    NATIVE = "native"
    ORDERED = "ordered"


class GradSync(StrEnum):
    """Which micro-batches of an accumulated step reduce their gradients."""

    EVERY_MICRO_BATCH = "every_micro_batch"  # least memory
    LAST_MICRO_BATCH = "last_micro_batch"  # least traffic, unsharded gradients are held
    LAST_MICRO_BATCH_OUTER = "last_micro_batch_outer"  # inside the shard axis always, across last


class WrapKind(StrEnum):
    """How the units are chosen where no class names are given."""

    AUTO = "auto"  # the repeated blocks, found structurally
    TRANSFORMER = "transformer"  # the blocks that the model class names itself
    SIZE = "size"  # modules of at least wrap_min_params parameters
    NONE = "none"  # the whole model is one unit


class RecomputeKind(StrEnum):
    """What activation checkpointing drops in forward and computes again in backward."""

    NONE = "none"
    BLOCK = "block"  # the inside of every block (or of every n-th: `every_2`)
    SELECTIVE = "selective"  # all but the results of matrix products and attention
    OFFLOAD = "offload"  # nothing: activations wait on the host


class Backend(StrEnum):
    """The engine that runs the plan."""

    TORCH = "torch"
    JAX = "jax"


class TokenDType(StrEnum):
    """Of tokens in files."""

    UINT8 = "uint8"
    INT16 = "int16"
    UINT16 = "uint16"
    INT32 = "int32"
    UINT32 = "uint32"
    INT64 = "int64"


class Home(StrEnum):
    """Where a kind of state lives between uses when it is not on the device."""

    CPU = "cpu"
    NVME = "nvme"


class IntervalStrategy(StrEnum):
    """When something periodic (evaluation, saving, logging) happens."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"


class LrSchedule(StrEnum):
    """The learning rate over the steps, after the warm-up."""

    LINEAR = "linear"  # to zero at the last step
    COSINE = "cosine"  # half a cosine to zero at the last step
    CONSTANT = "constant"  # no warm-up either
    CONSTANT_WITH_WARMUP = "constant_with_warmup"


class MatmulPrecision(StrEnum):
    """How exactly float32 matrix products are computed: torch.set_float32_matmul_precision."""

    HIGHEST = "highest"  # float32
    HIGH = "high"  # TF32 on NVIDIA GPUs
    MEDIUM = "medium"  # bfloat16


class DistillLoss(StrEnum):
    """How far a student is from its teacher."""

    FORWARD_KL = "forward_kl"  # KL(teacher || student): the student covers what the teacher says
    REVERSE_KL = "reverse_kl"  # KL(student || teacher): it keeps to what the teacher says most
    JSD = "jsd"  # generalized Jensen-Shannon: between the two, by beta
    HIDDEN = "hidden"  # hidden states, through projections that are learned along


class Tracker(StrEnum):
    """Where metrics are shown beside the run's own files, by the names of `report_to`."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"
    TRACKIO = "trackio"


class Optimizer(StrEnum):
    """The optimizers of the main loop, under Hugging Face's names."""

    ADAMW_TORCH = "adamw_torch"
    ADAMW_TORCH_FUSED = "adamw_torch_fused"
    SGD = "sgd"
    MUON = "muon"
    ADAFACTOR = "adafactor"
    ADAMW_BNB_8BIT = "adamw_bnb_8bit"


# Which need whole tensors: each of these has one owner among the ranks.
BY_OWNER = (Optimizer.MUON, Optimizer.ADAFACTOR, Optimizer.ADAMW_BNB_8BIT)


# ---- spellings: a table per enum that has any beyond the values of its members ------------------

SPELLINGS: Mapping[type[StrEnum], Mapping[str, StrEnum]] = {
    Strategy: {
        "full": Strategy.FULL_SHARD,
        "fsdp": Strategy.FULL_SHARD,
        "zero3": Strategy.FULL_SHARD,
        "zero_3": Strategy.FULL_SHARD,
        "1": Strategy.FULL_SHARD,
        "grad_op": Strategy.SHARD_GRAD_OP,
        "zero2": Strategy.SHARD_GRAD_OP,
        "zero_2": Strategy.SHARD_GRAD_OP,
        "2": Strategy.SHARD_GRAD_OP,
        "ddp": Strategy.NO_SHARD,
        "zero0": Strategy.NO_SHARD,
        "zero_0": Strategy.NO_SHARD,
        "3": Strategy.NO_SHARD,
        "hybrid": Strategy.HYBRID_SHARD,
        "hybrid_full": Strategy.HYBRID_SHARD,
        "hybrid_full_shard": Strategy.HYBRID_SHARD,
        "hsdp": Strategy.HYBRID_SHARD,
        "4": Strategy.HYBRID_SHARD,
        "_hybrid_shard_zero2": Strategy.HYBRID_SHARD_ZERO2,
        "hybrid_zero2": Strategy.HYBRID_SHARD_ZERO2,
        "hybrid_shard_grad_op": Strategy.HYBRID_SHARD_ZERO2,
        "5": Strategy.HYBRID_SHARD_ZERO2,
    },
    DType: {
        "fp64": DType.FLOAT64,
        "f64": DType.FLOAT64,
        "double": DType.FLOAT64,
        "fp32": DType.FLOAT32,
        "f32": DType.FLOAT32,
        "float": DType.FLOAT32,
        "bf16": DType.BFLOAT16,
        "fp16": DType.FLOAT16,
        "f16": DType.FLOAT16,
        "half": DType.FLOAT16,
    },
    GradReduction: {"avg": GradReduction.MEAN, "average": GradReduction.MEAN},
    WrapKind: {
        "transformer_based_wrap": WrapKind.TRANSFORMER,
        "transformer_based": WrapKind.TRANSFORMER,
        "size_based_wrap": WrapKind.SIZE,
        "size_based": WrapKind.SIZE,
        "no_wrap": WrapKind.NONE,
        "no": WrapKind.NONE,
        "false": WrapKind.NONE,
        "root": WrapKind.NONE,
    },
    RecomputeKind: {
        "no": RecomputeKind.NONE,
        "off": RecomputeKind.NONE,
        "false": RecomputeKind.NONE,
        "true": RecomputeKind.BLOCK,
        "full": RecomputeKind.BLOCK,
    },
    Backend: {"pytorch": Backend.TORCH, "xla": Backend.JAX},
    Home: {"host": Home.CPU, "disk": Home.NVME},
    IntervalStrategy: {
        "none": IntervalStrategy.NO,
        "off": IntervalStrategy.NO,
        "false": IntervalStrategy.NO,
        "step": IntervalStrategy.STEPS,
        "epochs": IntervalStrategy.EPOCH,
    },
    MatmulPrecision: {"float32": MatmulPrecision.HIGHEST, "tf32": MatmulPrecision.HIGH},
    Optimizer: {
        "adamw": Optimizer.ADAMW_TORCH,
        "adamw_hf": Optimizer.ADAMW_TORCH,
        "adamw_fused": Optimizer.ADAMW_TORCH_FUSED,
        "adamw_8bit": Optimizer.ADAMW_BNB_8BIT,
    },
    DistillLoss: {
        "kl": DistillLoss.FORWARD_KL,
        "kld": DistillLoss.FORWARD_KL,
        "fkl": DistillLoss.FORWARD_KL,
        "rkl": DistillLoss.REVERSE_KL,
        "js": DistillLoss.JSD,
        "mse": DistillLoss.HIDDEN,
    },
}

# Words that mean something elsewhere and nothing here yet, by a part of them; and why.
_WHOLE = "it needs whole matrices; of these adafactor and muon are there"
_BLOCKS = "it scales blocks of a tensor together; of these adamw_bnb_8bit is there"
LATER: Mapping[type[StrEnum], Mapping[str, str]] = {
    LrSchedule: dict.fromkeys(
        ("restarts", "min_lr", "polynomial", "inverse_sqrt", "plateau", "stable_decay", "greedy"),
        "",
    ),
    Optimizer: {
        **dict.fromkeys(("8bit", "4bit"), _BLOCKS),
        **dict.fromkeys(("adafactor", "galore", "apollo"), _WHOLE),
        **dict.fromkeys(("_xla", "npu", "apex", "anyprecision", "paged", "stable", "free"), ""),
        **dict.fromkeys(("ademamix", "adagrad", "grokadamw", "lion", "lomo", "rmsprop"), ""),
    },
    IntervalStrategy: {"best": ""},
}

# BackwardPrefetch of FSDP1, as a depth.
PREFETCH_DEPTHS: Mapping[str, int] = {
    "backward_pre": 1,
    "pre": 1,
    "backward_post": 0,
    "post": 0,
    "no_prefetch": 0,
    "none": 0,
    "no": 0,
    "off": 0,
    "false": 0,
    "true": 1,
}


class Recompute(NamedTuple):
    """Activation checkpointing as data: what is recomputed, in every how many-th block."""

    kind: RecomputeKind
    every: int = 1

    def __str__(self) -> str:
        """The word that a configuration says: `none`, `block`, `every_2`."""
        return f"every_{self.every}" if self.every > 1 else self.kind.value


EnumT = TypeVar("EnumT", bound=StrEnum)


def parse(enum_cls: type[EnumT], value: object, key: str) -> EnumT:
    """The member that a value means.

    Args:
        enum_cls: one of the enums of this module.
        value: a member, a word in any accepted spelling, a number that other tools write for it,
            or an object that prints as a spelling (`torch.bfloat16`). Flags count as the word
            that YAML made them of: `no` arrives as False.
        key: the dotted key, for the message.

    Raises:
        ConfigError: with key, value, the choices and the nearest of them.
    """
    if isinstance(value, enum_cls):
        return value
    table = spellings(enum_cls)
    for word in words_of(value):
        if word in table:
            return table[word]
    raise ConfigProblems([unknown_word(enum_cls, value, key)])


def parse_recompute(value: object, key: str) -> Recompute:
    """`none | block | selective | offload | every_2 | every_3 ...`, or a flag, as data."""
    if isinstance(value, Recompute):
        return value
    for word in words_of(value):
        head, _, count = word.partition("every_")
        if not head and count.isdecimal() and int(count) >= 1:
            return Recompute(RecomputeKind.BLOCK, int(count))
        if word in spellings(RecomputeKind):
            return Recompute(spellings(RecomputeKind)[word])
    choices = (*_values(RecomputeKind), "every_2", "every_3")
    raise ConfigProblems(
        [
            _unlisted(
                value,
                key,
                "one of none, block, selective, offload, every_2 (every_3 and so on)",
                choices,
            )
        ]
    )


def spellings(enum_cls: type[EnumT]) -> dict[str, EnumT]:
    """Every accepted word of an enum, in lower case with `_`, and what it means."""
    table = {member.value: member for member in enum_cls}
    for word, member in SPELLINGS.get(enum_cls, {}).items():
        assert isinstance(member, enum_cls)
        table[word] = member
    return table


def words_of(value: object) -> tuple[str, ...]:
    """The words that a value may stand for: itself, then its last dotted part.

    YAML 1.1 turns `no` and `off` into False, `yes` and `on` into True: these give `no` and
    `false`, `yes` and `true`.
    """
    if value is None:
        return ()
    if isinstance(value, bool):
        return ("true", "yes") if value else ("false", "no")
    word = str(value).strip().lower().replace("-", "_")
    last = word.rpartition(".")[2]
    return (word,) if last[:1].isdigit() else (word, last)  # 0.3 does not mean 3


def nearest(word: str, choices: Collection[str]) -> str | None:
    """The choice that a mistyped word most likely meant, or None where none is near.

    A word that begins exactly one choice means that choice (`cos`: cosine), that ends exactly one
    (`epochs`: num_train_epochs) or is its initials (`lr`: learning_rate) as well, and so does one
    of the same parts in another order (`prefetch_forward`); otherwise the most similar one by
    difflib, compared without regard to case and with `-` as `_`.
    """
    wanted = word.strip().lower().replace("-", "_")
    by_word = {choice.lower().replace("-", "_"): choice for choice in choices}
    begun = [plain for plain in by_word if len(wanted) >= 3 and plain.startswith(wanted)]
    ended = [plain for plain in by_word if plain.endswith(f"_{wanted}")]
    short = [
        p for p in by_word if "_" in p and wanted == "".join(part[:1] for part in p.split("_"))
    ]
    for found in (begun, ended, short[:1]):
        if len(found) == 1:
            return by_word[found[0]]
    turned = {plain for plain in by_word if sorted(plain.split("_")) == sorted(wanted.split("_"))}
    close = sorted(turned) or difflib.get_close_matches(wanted, list(by_word), n=1, cutoff=0.6)
    return by_word[close[0]] if close else None


def unknown_word(enum_cls: type[StrEnum], value: object, key: str) -> Problem:
    """The problem of a value that is no spelling of the enum."""
    own = _values(enum_cls)
    later = [why for part, why in LATER.get(enum_cls, {}).items() if part in str(value).lower()]
    if isinstance(value, str) and later:
        advice = "This word of Hugging Face's is not yet supported"
        advice += f": {later[0]}" if later[0] else ""
        return Problem(key, "one of " + ", ".join(own), show(value), advice)
    near_own = isinstance(value, str) and nearest(value, own)
    return _unlisted(
        value, key, "one of " + ", ".join(own), own if near_own else spellings(enum_cls)
    )


def did_you_mean(word: str, choices: Collection[str]) -> str:
    """`Did you mean 'x'?`, or nothing where no choice is near."""
    near = nearest(word, choices)
    return f"Did you mean '{near}'?" if near else ""


def _unlisted(value: object, key: str, expected: str, choices: Collection[str]) -> Problem:
    """Advice names a choice only for a word: a number or a list was not mistyped."""
    advice = did_you_mean(value, choices) if isinstance(value, str) else ""
    return Problem(key, expected, show(value), advice)


def _values(enum_cls: type[StrEnum]) -> list[str]:
    return [member.value for member in enum_cls]
