"""The words of a configuration: enums, and every spelling of other tools that means one of them.

Text becomes an enum here, once; inside fullshard, code matches on enums. A spelling is compared
without regard to case, and `-` counts as `_`. A dotted value counts by its last part, so that
`torch.bfloat16`, `ShardingStrategy.FULL_SHARD` and the objects that print like this are words too.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

from fullshard.config.problems import ConfigProblems, Problem, show

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema


class Choice(StrEnum):
    """An enum whose members also list the spellings that other tools have for them.

    A field of this type accepts every spelling; its JSON Schema offers our own words alone.
    """

    spellings: tuple[str, ...]

    def __new__(cls, word: str, spellings: str = "") -> Self:
        """Our own word, and other spellings in lower case between blanks."""
        member = str.__new__(cls, word)
        member._value_, member.spellings = word, tuple(spellings.split())
        return member

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Read a field of this type as `parse` does."""
        # Not at the top, because `fullshard --help` imports this file.
        from pydantic_core import core_schema

        def read(value: object) -> Self:
            return parse(cls, value, "")

        return core_schema.no_info_before_validator_function(read, handler(source))


class Strategy(Choice):
    """What every rank keeps of each kind of state between uses."""

    # ZeRO-3: parameters, gradients, optimizer state sharded
    FULL_SHARD = "full_shard", "full fsdp zero3 zero_3 1"
    # ZeRO-2: parameters stay gathered from forward to backward
    SHARD_GRAD_OP = "shard_grad_op", "grad_op zero2 zero_2 2"
    # DDP: every rank keeps everything
    NO_SHARD = "no_shard", "ddp zero0 zero_0 3"
    # full_shard inside a host, copies across hosts
    HYBRID_SHARD = "hybrid_shard", "hybrid hybrid_full hybrid_full_shard hsdp 4"
    # shard_grad_op inside a host, copies across hosts
    HYBRID_SHARD_ZERO2 = (
        "hybrid_shard_zero2",
        "_hybrid_shard_zero2 hybrid_zero2 hybrid_shard_grad_op 5",
    )
    # the planner chooses, if the batch is known
    AUTO = "auto"


class DType(Choice):
    """A floating point dtype, under torch's name."""

    FLOAT64 = "float64", "fp64 f64 double"
    FLOAT32 = "float32", "fp32 f32 float"
    BFLOAT16 = "bfloat16", "bf16"
    FLOAT16 = "float16", "fp16 f16 half"


class Transport(Choice):
    """What moves the bytes of gathers and reductions."""

    AUTO = "auto"
    C10D = "c10d"  # torch's own collectives, in place
    DIRECT = "direct"  # gloo: each rank sends each peer only the slice that it needs
    SHARED = "shared"  # the ranks of a host map one master copy
    FAKE = "fake"  # any world size in one process; no data is moved


class GradReduction(Choice):
    """What the gradients of the ranks become: their mean (as DDP and FSDP) or their sum."""

    MEAN = "mean", "avg average"
    SUM = "sum"


class Reduction(Choice):
    """In which order c10d adds: its own (fast), or rank order (the bits of other transports)."""

    NATIVE = "native"
    ORDERED = "ordered"


class GradSync(Choice):
    """Which micro-batches of an accumulated step reduce their gradients."""

    EVERY_MICRO_BATCH = "every_micro_batch"  # least memory
    LAST_MICRO_BATCH = "last_micro_batch"  # least traffic; unsharded gradients stay in memory
    LAST_MICRO_BATCH_OUTER = "last_micro_batch_outer"  # inside the shard axis always, across last


class WrapKind(Choice):
    """How the units are chosen if no class names are given."""

    AUTO = "auto"  # the repeated blocks, found structurally
    # the blocks that the model class names itself
    TRANSFORMER = "transformer", "transformer_based_wrap transformer_based"
    # modules of at least wrap_min_params parameters
    SIZE = "size", "size_based_wrap size_based"
    # the whole model is one unit
    NONE = "none", "no_wrap no false root"


class RecomputeKind(Choice):
    """What activation checkpointing drops in forward and computes again in backward."""

    NONE = "none", "no off false"
    BLOCK = "block", "true full"  # the inside of every block (or of every n-th: `every_2`)
    SELECTIVE = "selective"  # everything but the results of matrix products and attention
    OFFLOAD = "offload"  # nothing: activations are kept on the host


class Backend(Choice):
    """The engine that runs the plan."""

    TORCH = "torch", "pytorch"
    JAX = "jax", "xla"


class TokenDType(Choice):
    """The dtype of tokens in files."""

    UINT8 = "uint8"
    INT16 = "int16"
    UINT16 = "uint16"
    INT32 = "int32"
    UINT32 = "uint32"
    INT64 = "int64"


class MatmulPrecision(Choice):
    """Precision of float32 matrix products: torch.set_float32_matmul_precision."""

    HIGHEST = "highest", "float32"  # float32
    HIGH = "high", "tf32"  # TF32 on NVIDIA GPUs
    MEDIUM = "medium"  # bfloat16


class Home(Choice):
    """The memory of a kind of state between uses, if not the device's."""

    CPU = "cpu", "host"
    NVME = "nvme", "disk"


class IntervalStrategy(Choice):
    """When something periodic (evaluation, saving, logging) happens."""

    NO = "no", "none off false"
    STEPS = "steps", "step"
    EPOCH = "epoch", "epochs"


class LrSchedule(Choice):
    """The learning rate over the steps, after the warm-up."""

    LINEAR = "linear"  # to zero at the last step
    COSINE = "cosine"  # half a cosine to zero at the last step
    CONSTANT = "constant"  # no warm-up either
    CONSTANT_WITH_WARMUP = "constant_with_warmup"


class DistillLoss(Choice):
    """The distance of a student from its teacher."""

    FORWARD_KL = "forward_kl", "kl kld fkl"  # KL(teacher || student): covers all of the teacher's
    REVERSE_KL = "reverse_kl", "rkl"  # KL(student || teacher): keeps to the teacher's likeliest
    JSD = "jsd", "js"  # generalized Jensen-Shannon: between the two, by beta
    HIDDEN = "hidden", "mse"  # hidden states, through projections that are learned too


class Tracker(Choice):
    """Where metrics are shown in addition to the run's own files, by the names of `report_to`."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"
    TRACKIO = "trackio"


class Optimizer(Choice):
    """The optimizers of the main loop, under Hugging Face's names."""

    ADAMW_TORCH = "adamw_torch", "adamw adamw_hf"
    ADAMW_TORCH_FUSED = "adamw_torch_fused", "adamw_fused"
    SGD = "sgd"
    MUON = "muon"
    ADAFACTOR = "adafactor"
    ADAMW_BNB_8BIT = "adamw_bnb_8bit", "adamw_8bit"


# Optimizers that need whole tensors: one rank owns each tensor.
BY_OWNER = (Optimizer.MUON, Optimizer.ADAFACTOR, Optimizer.ADAMW_BNB_8BIT)

# Hugging Face's words that are not supported yet, by a part of them, and the reason.
LATER: Mapping[type[Choice], Mapping[str, str]] = {
    LrSchedule: {"restarts min_lr polynomial inverse_sqrt plateau stable_decay greedy": ""},
    Optimizer: {
        "8bit 4bit": "it scales blocks of a tensor together; of these adamw_bnb_8bit is there",
        "adafactor galore apollo": "it needs whole matrices; of these adafactor and muon are there",
        "_xla npu apex anyprecision paged stable free": "",
        "ademamix adagrad grokadamw lion lomo rmsprop": "",
    },
    IntervalStrategy: {"best": ""},
}

# BackwardPrefetch of FSDP1, as a depth.
PREFETCH_DEPTHS: Mapping[str, int] = {
    **dict.fromkeys(("backward_pre", "pre", "true"), 1),
    **dict.fromkeys(("backward_post", "post", "no_prefetch", "none", "no", "off", "false"), 0),
}


class Recompute(NamedTuple):
    """Activation checkpointing as data: what is recomputed, in every how many-th block."""

    kind: RecomputeKind
    every: int = 1

    def __str__(self) -> str:
        """The word that a configuration says: `none`, `block`, `every_2`."""
        return f"every_{self.every}" if self.every > 1 else self.kind.value


ChoiceT = TypeVar("ChoiceT", bound=Choice)


def parse(enum_cls: type[ChoiceT], value: object, key: str) -> ChoiceT:
    """The member that a value means.

    Args:
        enum_cls: one of the enums of this module.
        value: a member, a word in any accepted spelling, a number that other tools write for it,
            or an object that prints as a spelling (`torch.bfloat16`). A flag counts as the word
            that YAML read as a flag: `no` arrives as False.
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
    own = [member.value for member in enum_cls]
    expected = "one of " + ", ".join(own)
    if not isinstance(value, str):  # a number or a list is no misspelt word
        raise ConfigProblems([Problem(key, expected, show(value))])
    for parts, why in LATER.get(enum_cls, {}).items():
        if any(part in value.lower() for part in parts.split()):
            advice = "This word of Hugging Face's is not yet supported"
            advice += f": {why}" if why else ""
            raise ConfigProblems([Problem(key, expected, show(value), advice)])
    hint = did_you_mean(value, own) or did_you_mean(value, table)
    raise ConfigProblems([Problem(key, expected, show(value), hint)])


def parse_recompute(value: object) -> Recompute:
    """Read `none | block | selective | offload | every_2 | every_3 ...`, or a flag."""
    if isinstance(value, Recompute):
        return value
    table = spellings(RecomputeKind)
    for word in words_of(value):
        head, _, count = word.partition("every_")
        if not head and count.isdecimal() and int(count) >= 1:
            return Recompute(RecomputeKind.BLOCK, int(count))
        if word in table:
            return Recompute(table[word])
    hint = did_you_mean(value, [*RecomputeKind, "every_2", "every_3"])
    expected = "one of none, block, selective, offload, every_2 (every_3 and so on)"
    raise ConfigProblems([Problem("", expected, show(value), hint)])


def spellings(enum_cls: type[ChoiceT]) -> dict[str, ChoiceT]:
    """Every accepted word of an enum, in lower case with `_`, and its member."""
    return {word: member for member in enum_cls for word in (member.value, *member.spellings)}


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


def did_you_mean(value: object, choices: Collection[str]) -> str:
    """`Did you mean 'x'?`; nothing if no choice is near, or the value is no text."""
    near = nearest(value, choices) if isinstance(value, str) else None
    return f"Did you mean '{near}'?" if near else ""
