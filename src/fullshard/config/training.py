"""TrainingConfig: the names of Hugging Face's TrainingArguments that the main loop supports,
and the names that are not fields here or that set another key.

    names    names below `training` without effect, lost or not supported yet (dialects/keys.yaml)
    MOVES    keys that set another key: `training.bf16` sets a dtype of `sharding`
    RIVALS   pairs of keys with the same meaning
    UNASKED  the values of such keys that ask for nothing

Other names of a field of the same section are in that section's `ALIASES`. The names are those of
transformers 4.40, transformers 5.x and TRL's SFTConfig. A name that is not supported yet accepts
values that request the existing behaviour, so a file with all defaults works. `config explain` has
a line for each name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, ClassVar, Self

from pydantic import BeforeValidator, model_validator

from fullshard.config.fields import (
    Count,
    CountOrAuto,
    Depth,
    Flag,
    Number,
    Positive,
    Rate,
    Rejected,
    Section,
    Share,
    Text,
    to_flag,
    to_names,
    to_number,
)
from fullshard.config.rules import Rule, rows
from fullshard.config.values import (
    ConfigProblems,
    IntervalStrategy,
    LrSchedule,
    MatmulPrecision,
    Optimizer,
    Problem,
    Tracker,
    did_you_mean,
    show,
    words_of,
)


def _read_steps(value: object) -> object:
    """Reads a number of steps, or a fraction of all steps below 1, as in Hugging Face."""
    number = to_number(value)
    if number is None or number <= 0 or (number >= 1 and number != int(number)):
        raise Rejected("an integer >= 1, or a share of all steps between 0 and 1")
    return int(number) if number >= 1 else number


def _read_resume(value: object) -> object:
    """Reads a folder; false and `never` disable resuming."""
    if value is None:
        return None
    if value is False or words_of(value)[0] in ("false", "no", "never"):
        return "never"
    return "auto" if words_of(value)[0] in ("true", "yes") else value


def _read_trackers(value: object) -> object:
    """Reads `none`, `all`, or trackers in any case, as text or a list."""
    names = [name.lower() for name in to_names([] if value is None else value)]
    known = [str(tracker) for tracker in Tracker]
    if names in ([], ["none"]):
        return ()
    if names == ["all"]:
        return tuple(known)
    for name in names:
        if name not in known:
            raise Rejected(
                f"none, all, or names among {', '.join(known)}", did_you_mean(name, known)
            )
    return tuple(names)


Steps = Annotated[int | float, BeforeValidator(_read_steps)]
_NoneOrSteps = BeforeValidator(lambda v: 0 if to_number(v) == 0 else _read_steps(v))
Warmup = Annotated[int | float, _NoneOrSteps]

DEFAULT_SAMPLES = 8  # Hugging Face's default


class TrainingConfig(Section):
    """The main loop, with Hugging Face's names, meanings and defaults (transformers 4.40 to 5.x).

    A name of TrainingArguments that is not supported yet is an error, unless its value requests the
    existing behaviour. An unknown name is an error that suggests the nearest name.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {
        "max_length": "max_seq_length",  # TRL's name since 0.16
        "evaluation_strategy": "eval_strategy",  # until transformers 4.46
    }

    output_dir: Text | None = None
    """Folder of the run. None: runs/<command>."""

    report_to: Annotated[tuple[Tracker, ...], BeforeValidator(_read_trackers)] = ()
    """Trackers that receive the metrics: none | all | tensorboard, wandb, mlflow, trackio. A
    missing one is reported once; metrics.jsonl and metrics.csv are always written."""

    run_name: Text | None = None
    """The run's name in trackers. None: output_dir."""

    project: Text = "fullshard"
    """Name of the project in trackers."""

    logging_dir: Text | None = None
    """Folder of TensorBoard's files. None: tensorboard/ in output_dir."""

    max_steps: Annotated[int, Number(at_least=-1)] = -1
    """Number of updates. Above 0, it overrides num_train_epochs."""

    num_train_epochs: Positive = 3.0
    """Number of passes over the training data, if max_steps is not set."""

    per_device_train_batch_size: CountOrAuto = DEFAULT_SAMPLES
    """Sequences per rank and micro-batch. auto: the planner divides a rank's part of
    train_batch_size, or 8 x gradient_accumulation_steps, into the micro-batches that fit best."""

    per_device_eval_batch_size: Count = 8
    """Sequences per rank and evaluation batch."""

    gradient_accumulation_steps: Count = 1
    """Micro-batches per update. An update has gradient_accumulation_steps x ranks x
    per_device_train_batch_size sequences."""

    train_batch_size: Count | None = None
    """Sequences per update over all ranks (DeepSpeed's name), from which
    per_device_train_batch_size follows. None: it follows from the other two."""

    max_seq_length: Annotated[int, Number(at_least=2)] = 1024
    """Tokens per sequence (alias max_length; TRL has the same default)."""

    loss_chunk_size: Depth = 512
    """Number of tokens whose logits are in memory at a time, for a model with a plain linear head.
    0: all tokens."""

    learning_rate: Rate = 5e-5
    """Peak learning rate."""

    weight_decay: Rate = 0.0
    """Decay of weights, except biases and norms (by name). AdamW's is decoupled; sgd adds it to the
    gradient."""

    adam_beta1: Share = 0.9
    """Decay of the first moment."""

    adam_beta2: Share = 0.999
    """Decay of the second moment."""

    adam_epsilon: Positive = 1e-8
    """Added to the square root of the second moment."""

    max_skipped_steps: Depth = 0
    """Number of updates with a non-finite gradient that are skipped; another one ends the run."""

    ema_decay: Share | None = None
    """Keep a sharded moving average of the weights, updated as ema_decay x average + (1 -
    ema_decay) x weights. It is evaluated at the end and written to model_ema/. It needs as much
    memory as the parameter shards. None: no average."""

    max_grad_norm: Rate = 1.0
    """Global gradient norm above which gradients are scaled down. 0: never."""

    lr_scheduler_type: LrSchedule = LrSchedule.LINEAR
    """linear | cosine | constant | constant_with_warmup."""

    warmup_steps: Warmup = 0
    """Warm-up steps; below 1 a share of all steps. Above 0, it overrides warmup_ratio."""

    warmup_ratio: Share = 0.0
    """The warm-up as a share of all steps."""

    logging_steps: Steps = 500
    """Steps between two printed lines; below 1 a share of all steps. metrics.jsonl has every
    step."""

    eval_strategy: IntervalStrategy | None = None
    """no | steps | epoch (alias evaluation_strategy). None: steps if eval_steps is set, otherwise
    no."""

    eval_steps: Steps | None = None
    """Steps between two evaluations; below 1 a share of all steps. None: logging_steps."""

    early_stopping_patience: Count | None = None
    """Evaluations in a row without a better held-out loss that end the run. None: never."""

    early_stopping_threshold: Rate = 0.0
    """Nats by which a held-out loss must be below the best one to count as better."""

    save_strategy: IntervalStrategy | None = None
    """no | steps | epoch; the last step is always saved, unless no. None: steps."""

    save_steps: Steps | None = None
    """Steps between two checkpoints; below 1 a share of all steps. None: 500."""

    save_total_limit: Count | None = None
    """Number of complete checkpoints to keep. None: all."""

    checkpoint_dir: Text | None = None
    """Folder or URL (`s3://bucket/run`) of the checkpoints. None: checkpoints/ in output_dir."""

    resume_from_checkpoint: Annotated[Text | None, BeforeValidator(_read_resume)] = None
    """A checkpoint, or a folder of them, to start from; `auto`: the run's own (--resume)."""

    seed: Depth = 42
    """Seed of the initial weights and of the order of the data."""

    bf16: Flag | None = None
    """true: sharding.param_dtype is bfloat16. None: sharding decides."""

    fp16: Flag | None = None
    """true: sharding.param_dtype is float16, and the loss is scaled. None: sharding decides."""

    matmul_precision: MatmulPrecision | None = None
    """highest | high | medium: precision of float32 matrix products on every rank
    (torch.set_float32_matmul_precision; high is TF32 on NVIDIA GPUs). None: torch's own setting."""

    tf32: Flag | None = None
    """true: matmul_precision is high. None: matmul_precision decides."""

    gradient_checkpointing: Flag | None = None
    """true: sharding.activation_checkpointing is block. None: sharding decides."""

    optim: Optimizer = Optimizer.ADAMW_TORCH_FUSED
    """adamw_torch_fused | adamw_torch | sgd update shards; muon (matrices of blocks; AdamW for the
    rest) | adafactor | adamw_bnb_8bit (alias adamw_8bit; needs bitsandbytes) update whole tensors,
    each on one rank."""

    @model_validator(mode="after")
    def _has_what_it_waits_for(self) -> Self:
        waits = self.early_stopping_patience is not None
        if waits and self.evaluates is IntervalStrategy.NO:
            got, advice = "needs evaluations", "Set eval_steps or eval_strategy"
            raise ConfigProblems([Problem("early_stopping_patience", "", got, advice)])
        if not waits and self.early_stopping_threshold:
            got, advice = "no effect without early_stopping_patience", "Set both or neither"
            raise ConfigProblems([Problem("early_stopping_threshold", "", got, advice)])
        return self

    @property
    def evaluates(self) -> IntervalStrategy:
        """When evaluation happens, after defaults are applied."""
        if self.eval_strategy is not None:
            return self.eval_strategy
        return IntervalStrategy.NO if self.eval_steps is None else IntervalStrategy.STEPS

    def divided(self, world_size: int) -> Self:
        """Returns the configuration with train_batch_size divided over ranks and micro-batches.

        Raises:
            ConfigError: train_batch_size is not a multiple of the ranks and the given part of the
                batch.
        """
        if self.train_batch_size is None or self.leaves_micro_batch:
            return self
        micro, accumulation = "per_device_train_batch_size", "gradient_accumulation_steps"
        says_micro, says_accumulation = (n in self.model_fields_set for n in (micro, accumulation))
        parts = world_size * (self.per_device_train_batch_size if says_micro else 1)
        parts *= self.gradient_accumulation_steps if says_accumulation else 1
        rest, remainder = divmod(self.train_batch_size, parts)
        if remainder or (says_micro and says_accumulation and rest != 1):
            of = "" if says_micro and says_accumulation else "a multiple of "
            expected = f"{of}{parts}, which is ranks x {micro} x {accumulation}"
            raise ConfigProblems(
                [Problem("train_batch_size", expected, show(self.train_batch_size))]
            )
        if says_micro and says_accumulation:
            return self
        return self.model_copy(update={accumulation if says_micro else micro: rest})

    @property
    def leaves_micro_batch(self) -> bool:
        """Whether per_device_train_batch_size is auto."""
        return self.per_device_train_batch_size == 0

    def undivided(self, world_size: int) -> Self:
        """Returns the configuration with all sequences of a rank's update in one micro-batch.

        Raises:
            ConfigError: train_batch_size is not a multiple of the ranks.
        """
        samples = DEFAULT_SAMPLES * self.gradient_accumulation_steps
        if self.train_batch_size is not None:
            samples, remainder = divmod(self.train_batch_size, world_size)
            if remainder:
                expected = f"a multiple of {world_size} ranks"
                got = show(self.train_batch_size)
                raise ConfigProblems([Problem("training.train_batch_size", expected, got)])
        return self.in_micro_batches(samples, 1)

    def in_micro_batches(self, micro_batch: int, accumulation: int) -> Self:
        """Returns the configuration with this many sequences per micro-batch and rank."""
        changes = {
            "per_device_train_batch_size": micro_batch,
            "gradient_accumulation_steps": accumulation,
            "train_batch_size": None,
        }
        return self.model_copy(update=changes)

    @property
    def saves(self) -> IntervalStrategy:
        """When checkpoints are saved, after defaults are applied."""
        return IntervalStrategy.STEPS if self.save_strategy is None else self.save_strategy

    @classmethod
    def known_names(cls) -> list[str]:
        """Names for suggestions, including those that are not supported yet."""
        return [*super().known_names(), *names()]


# ---- names that are not fields, or that set another key


@cache
def names() -> Mapping[str, Rule]:
    """Names below `training` that are not fields."""
    return rows("TRAINING")


@dataclass(frozen=True)
class Move:
    """A key that sets one of our keys.

    Args:
        source: dotted key as written.
        target: dotted key that it sets.
        on: the target's value for true, if the source is also a flag of its own section.
        off: the target's value for false; empty: any value other than `on`.
    """

    source: str
    target: str
    on: str = ""
    off: str = ""

    @property
    def stays(self) -> bool:
        """Whether the source is also a field of its section."""
        return bool(self.on)

    def implied(self, said: object) -> object:
        """The target's value for a value of the source; None if it sets none."""
        if not self.on:
            return said
        return self.on if said is not None and to_flag(said) else None


SFT_NAMES = ("packing", "completion_only_loss", "assistant_only_loss", "chat_template_path")
_RECOMPUTE = "sharding.activation_checkpointing"

MOVES = (
    Move("strategy", "sharding.strategy"),
    Move("training.ddp_timeout", "launch.timeout"),
    Move("training.dataset_text_field", "data.text_column"),
    Move("training.activation_checkpointing", _RECOMPUTE),
    *(Move(f"training.{name}", f"sft.{name}") for name in SFT_NAMES),
    Move("training.tf32", "training.matmul_precision", on="high", off="highest"),
    Move("training.bf16", "sharding.param_dtype", on="bfloat16"),
    Move("training.fp16", "sharding.param_dtype", on="float16"),
    Move("training.gradient_checkpointing", _RECOMPUTE, on="block", off="none"),
)

# Names below `training` that set another key.
MOVED = {
    move.source.removeprefix("training."): move
    for move in MOVES
    if move.source.startswith("training.")
}

# Pairs of keys with the same meaning: one on the command line replaces the other in the file.
RIVALS = (
    *((move.source, move.target) for move in MOVES if move.stays),
    ("launch.num_processes", "launch.nproc_per_node"),
    ("model.name_or_path", "model.config"),
    ("teacher.name_or_path", "teacher.config"),
    ("training.bf16", "training.fp16"),
    ("training.num_train_epochs", "training.max_steps"),
    ("training.train_batch_size", "training.per_device_train_batch_size"),
    ("training.warmup_ratio", "training.warmup_steps"),
)

# Values that ask for nothing, so that a key with the same meaning still decides (null: of any key).
UNASKED = {
    **dict.fromkeys(("training.bf16", "training.fp16"), (False,)),
    **dict.fromkeys(("training.warmup_steps", "training.warmup_ratio"), (0,)),
    "training.max_steps": (-1, 0),
}
