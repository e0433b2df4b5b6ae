"""The enums of a configuration, with the spellings of other tools, and problems of an input.

Text is converted to an enum here, once; all other code matches on enums. Comparison ignores case
and treats `-` as `_`. Only the last part of a dotted value counts, so `torch.bfloat16`,
`ShardingStrategy.FULL_SHARD` and the objects that print like this are accepted.

All problems of an input are one error, ConfigProblems. Each is a line of one grammar:

    train.yaml:12: sharding.strategy: expected one of full_shard, no_shard; got 'ful'. Did you ...?
    ^ place        ^ key              ^ expected                            ^ got      ^ advice
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

from fullshard.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema


# ---- the enums


class Choice(StrEnum):
    """An enum whose members have alternative spellings from other tools.

    A field of this type accepts every spelling; its JSON Schema contains only ours.
    """

    spellings: tuple[str, ...]

    def __new__(cls, word: str, spellings: str = "") -> Self:
        """Takes our word, and other lower-case spellings separated by blanks."""
        member = str.__new__(cls, word)
        member._value_, member.spellings = word, tuple(spellings.split())
        return member

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Reads a field of this type with `parse`."""
        # Not at the top, because `fullshard --help` imports this file.
        from pydantic_core import core_schema

        def read(value: object) -> Self:
            return parse(cls, value, "")

        return core_schema.no_info_before_validator_function(read, handler(source))


class Strategy(Choice):
    """Which state is sharded between uses."""

    # ZeRO-3: parameters, gradients, optimizer state sharded
    FULL_SHARD = "full_shard", "full fsdp zero3 zero_3 1"
    # ZeRO-2: parameters stay gathered from forward to backward
    SHARD_GRAD_OP = "shard_grad_op", "grad_op zero2 zero_2 2"
    # DDP: every rank keeps everything
    NO_SHARD = "no_shard", "ddp zero0 zero_0 3"
    # full_shard inside a host, replicas across hosts
    HYBRID_SHARD = "hybrid_shard", "hybrid hybrid_full hybrid_full_shard hsdp 4"
    # shard_grad_op inside a host, replicas across hosts
    HYBRID_SHARD_ZERO2 = (
        "hybrid_shard_zero2",
        "_hybrid_shard_zero2 hybrid_zero2 hybrid_shard_grad_op 5",
    )
    # the planner chooses, if the batch is known
    AUTO = "auto"


class DType(Choice):
    """A floating-point dtype, under torch's name."""

    FLOAT64 = "float64", "fp64 f64 double"
    FLOAT32 = "float32", "fp32 f32 float"
    BFLOAT16 = "bfloat16", "bf16"
    FLOAT16 = "float16", "fp16 f16 half"


class TransportKind(Choice):
    """The communication of gathers and reductions."""

    AUTO = "auto"
    C10D = "c10d"  # torch's own collectives, in place
    DIRECT = "direct"  # gloo: each rank sends a peer only the slice that the peer needs
    SHARED = "shared"  # the ranks of a host map one copy of the masters
    FAKE = "fake"  # any world size in one process; moves no data


class GradReduction(Choice):
    """The reduction of gradients over ranks: mean (as in DDP and FSDP) or sum."""

    MEAN = "mean", "avg average"
    SUM = "sum"


MOST_ROUNDED = 8  # ranks whose 16-bit gradients the backend may sum, which rounds each sum


class ReductionKind(Choice):
    """Who sums gradients over c10d, and in which order.

    The bits of `ordered` are those of other transports. `auto` is `ordered` for 16-bit gradients
    of more than 8 ranks and `native` otherwise.
    """

    AUTO = "auto"
    NATIVE = "native"  # the backend, in the dtype of the messages
    ORDERED = "ordered"  # each rank, in rank order, in at least float32

    def is_ordered(self, itemsize: int, num_ranks: int) -> bool:
        """Whether elements of this size from so many ranks are summed in rank order."""
        many = itemsize < 4 and num_ranks > MOST_ROUNDED
        return self is ReductionKind.ORDERED or (self is ReductionKind.AUTO and many)


class GradSync(Choice):
    """Which micro-batches of a step reduce their gradients."""

    EVERY_MICRO_BATCH = "every_micro_batch"  # least memory
    LAST_MICRO_BATCH = "last_micro_batch"  # least traffic; unsharded gradients stay in memory
    # over the shard axis every one, over the replicate axis the last
    LAST_MICRO_BATCH_OUTER = "last_micro_batch_outer"


class WrapKind(Choice):
    """How units are chosen without class names."""

    AUTO = "auto"  # repeated blocks, found by structure
    # blocks that the model class declares
    TRANSFORMER = "transformer", "transformer_based_wrap transformer_based"
    # modules of at least wrap_min_params parameters
    SIZE = "size", "size_based_wrap size_based"
    # the whole model is one unit
    NONE = "none", "no_wrap no false root"


class RecomputeKind(Choice):
    """The parts that activation checkpointing recomputes in backward."""

    NONE = "none", "no off false"
    BLOCK = "block", "true full"  # the inside of every block (or of every n-th: `every_2`)
    SELECTIVE = "selective"  # all but results of matrix products and attention
    OFFLOAD = "offload"  # nothing: activations are moved to the host


class Backend(Choice):
    """The engine that runs the plan."""

    TORCH = "torch", "pytorch"
    JAX = "jax", "xla"


class TokenDType(Choice):
    """The dtype of tokens in array files."""

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


class HomeKind(Choice):
    """The memory of offloaded state between uses."""

    CPU = "cpu", "host"
    NVME = "nvme", "disk"


class IntervalStrategy(Choice):
    """The interval of evaluation, saving or logging."""

    NO = "no", "none off false"
    STEPS = "steps", "step"
    EPOCH = "epoch", "epochs"


class LrSchedule(Choice):
    """The learning rate schedule after warm-up."""

    LINEAR = "linear"  # to zero at the last step
    COSINE = "cosine"  # half a cosine to zero at the last step
    CONSTANT = "constant"  # also without warm-up
    CONSTANT_WITH_WARMUP = "constant_with_warmup"


class DistillLoss(Choice):
    """The loss between a student and its teacher."""

    FORWARD_KL = "forward_kl", "kl kld fkl"  # KL(teacher || student): covers the whole distribution
    REVERSE_KL = "reverse_kl", "rkl"  # KL(student || teacher): covers the main modes
    JSD = "jsd", "js"  # generalized Jensen-Shannon: between both, by beta
    HIDDEN = "hidden"  # hidden states, through learned projections; mse may mean logits, too


class Tracker(Choice):
    """Trackers that receive metrics, under the names of `report_to`."""

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


# Optimizers that need full tensors: each tensor is owned by one rank.
BY_OWNER = (Optimizer.MUON, Optimizer.ADAFACTOR, Optimizer.ADAMW_BNB_8BIT)

# Unsupported Hugging Face values, by a part of the word, with the reason.
LATER: Mapping[type[Choice], Mapping[str, str]] = {
    LrSchedule: {"restarts min_lr polynomial inverse_sqrt plateau stable_decay greedy": ""},
    Optimizer: {
        "8bit 4bit": "of optimizers with 8-bit states, use adamw_bnb_8bit",
        "adafactor galore apollo": "of optimizers of whole matrices, use adafactor or muon",
        "_xla npu apex anyprecision paged stable free": "",
        "ademamix adagrad grokadamw lion lomo rmsprop": "",
    },
    IntervalStrategy: {"best": ""},
}

# FSDP1's BackwardPrefetch as a depth.
PREFETCH_DEPTHS: Mapping[str, int] = {
    **dict.fromkeys(("backward_pre", "pre", "true"), 1),
    **dict.fromkeys(("backward_post", "post", "no_prefetch", "none", "no", "off", "false"), 0),
}


class Recompute(NamedTuple):
    """Activation checkpointing: the recomputed parts, in every n-th block."""

    kind: RecomputeKind
    every: int = 1

    def __str__(self) -> str:
        """The configuration's word: `none`, `block`, `every_2`."""
        return f"every_{self.every}" if self.every > 1 else self.kind.value


# ---- from text to an enum

ChoiceT = TypeVar("ChoiceT", bound=Choice)


def parse(enum_cls: type[ChoiceT], value: object, key: str) -> ChoiceT:
    """Returns the member for a value.

    Args:
        enum_cls: one of the enums of this module.
        value: a member, a word in any accepted spelling, a number that other tools write for it,
            or an object that prints as a spelling (`torch.bfloat16`). A flag counts as the word
            that YAML read as a flag: `no` arrives as False.
        key: the dotted key, for the message.

    Raises:
        ConfigError: Names key, value, the choices and the nearest one.
    """
    if isinstance(value, enum_cls):
        return value
    table = spellings(enum_cls)
    for word in words_of(value):
        if word in table:
            return table[word]
    own = [member.value for member in enum_cls]
    expected = "one of " + ", ".join(own)
    if not isinstance(value, str):  # numbers and lists are not misspelled words
        raise ConfigProblems([Problem(key, expected, show(value))])
    for parts, why in LATER.get(enum_cls, {}).items():
        if any(part in value.lower() for part in parts.split()):
            advice = "This word of Hugging Face's is not yet supported"
            advice += f": {why}" if why else ""
            raise ConfigProblems([Problem(key, expected, show(value), advice)])
    hint = did_you_mean(value, own) or did_you_mean(value, table)
    raise ConfigProblems([Problem(key, expected, show(value), hint)])


def parse_recompute(value: object) -> Recompute:
    """Reads `none | block | selective | offload | every_2 | every_3 ...`, or a flag."""
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
    """Maps every accepted word of an enum, in lower case with `_`, to its member."""
    return {word: member for member in enum_cls for word in (member.value, *member.spellings)}


def words_of(value: object) -> tuple[str, ...]:
    """The words to try for a value: itself, then its last dotted part.

    YAML 1.1 reads `no` and `off` as False, `yes` and `on` as True. Flags therefore give `no` and
    `false`, or `yes` and `true`.
    """
    if value is None:
        return ()
    if isinstance(value, bool):
        return ("true", "yes") if value else ("false", "no")
    word = str(value).strip().lower().replace("-", "_")
    last = word.rpartition(".")[2]
    return (word,) if last[:1].isdigit() else (word, last)  # 0.3 is not 3


def nearest(word: str, choices: Collection[str]) -> str | None:
    """Returns the choice nearest to a mistyped word, or None.

    The first rule that matches exactly one choice decides: its beginning (`cos`: cosine), its end
    (`epochs`: num_train_epochs), its initials (`lr`: learning_rate), its parts in another order
    (`prefetch_forward`). Otherwise difflib's most similar choice is returned. Comparison ignores
    case and treats `-` as `_`.
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
    """`Did you mean 'x'?`; empty if no choice is near, or the value is not text."""
    near = nearest(value, choices) if isinstance(value, str) else None
    return f"Did you mean '{near}'?" if near else ""


# ---- problems of an input


@dataclasses.dataclass(frozen=True)
class Problem:
    """A single problem of an input.

    Args:
        key: dotted key, `sharding.strategy`; empty for the input as a whole.
        expected: description of valid values: `an integer >= 0`. Empty if `got` is enough.
        got: the given value, in words: `'ful'`, `a list`.
        advice: what to do, in one or two sentences; may be empty.
        place: `train.yaml:12` or `command line`; set by the loader.
    """

    key: str
    expected: str
    got: str
    advice: str = ""
    place: str = ""

    def __str__(self) -> str:
        """The problem as one line in the grammar of this file's docstring."""
        separator = "; " if "," in self.expected else ", "
        said = f"expected {self.expected}{separator}got {self.got}" if self.expected else self.got
        head = ": ".join(part for part in (self.place, self.key, said) if part)
        return f"{head}. {self.advice}".rstrip() if self.advice else head

    def below(self, prefix: str) -> Problem:
        """The problem with its key below another key."""
        return dataclasses.replace(self, key=join_key(prefix, self.key))


class ConfigProblems(ConfigError):
    """A ConfigError with a list of problems, so that a caller can add places."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        """Formats the problems: a single one as a line, several as a list."""
        self.problems = tuple(problems)
        assert self.problems, "an error needs at least one problem"
        super().__init__(_text(self.problems))

    def __reduce__(self) -> tuple[type[ConfigProblems], tuple[tuple[Problem, ...]]]:
        """Pickle by problems: errors travel between processes."""
        return (type(self), (self.problems,))

    def map(self, change: Callable[[Problem], Problem]) -> ConfigProblems:
        """A new error with a function applied to every problem."""
        return ConfigProblems(change(problem) for problem in self.problems)


def join_key(*parts: str) -> str:
    """Joins `sharding` and `strategy` to `sharding.strategy`; skips empty parts."""
    return ".".join(part for part in parts if part)


def show(value: object) -> str:
    """A value in the form of messages: text quoted, flags and null as in YAML."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            text = repr(str(value))  # an enum member by its word
        case int() | float():
            text = repr(value)
        case dict():
            return "a mapping"
        case list() | tuple():
            return "a list" if value else "an empty list"
        case _:
            text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _text(problems: tuple[Problem, ...]) -> str:
    if len(problems) == 1:
        return str(problems[0])
    lines = "".join(f"\n  {problem}" for problem in problems)
    return f"{len(problems)} problems:{lines}"
