"""Hugging Face names that are not fields here, or that set another key.

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

from fullshard.config.dialects.rules import Rule, rows
from fullshard.config.fields import to_flag


@cache
def names() -> Mapping[str, Rule]:
    """Names below `training` that are no fields."""
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
