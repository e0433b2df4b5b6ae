"""Keys whose meaning lives under another key: `training.bf16` is a dtype of `sharding`.

    strategy                          sharding.strategy
    training.bf16, training.fp16      sharding.param_dtype: bfloat16, float16
    training.tf32                     training.matmul_precision: high
    training.gradient_checkpointing   sharding.activation_checkpointing: block
    training.activation_checkpointing                 (its name in transformers 5)
    training.ddp_timeout              launch.timeout
    training.dataset_text_field       data.text_column
    training.packing ...              sft.packing ... (what else of TRL's SFT_NAMES stands there)

Where both are given they have to agree. The keys of the first column that are Hugging Face's own
flags stay in TrainingConfig, as they were given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from fullshard.config.fields import Rejected, to_flag
from fullshard.config.model import Section
from fullshard.config.problems import ConfigProblems, Problem, show


@dataclass(frozen=True)
class Move:
    """One row of the table above.

    Args:
        source: dotted key as people write it.
        target: dotted key that has the meaning.
        on: where the source is a flag, which stays a field of its own section too: the target's
            value where it is true.
        off: the target's one value that says no; none named: all values but `on` do.
    """

    source: str
    target: str
    on: str = ""
    off: str = ""

    @property
    def stays(self) -> bool:
        """Whether the source is a field of its own section too."""
        return bool(self.on)

    def implied(self, said: object) -> object:
        """The target's value for the source's; None where it implies nothing."""
        if not self.on:
            return said
        return self.on if said is not None and to_flag(said) else None

    def agrees(self, sections: type[Section], said: object, other: object) -> bool:
        """Whether a value of the target is what the source says."""
        if said is None:
            return True
        value = field_value(sections, self.target, other)
        if not self.on:
            return field_value(sections, self.target, said) == value
        is_on = value == field_value(sections, self.target, self.on)
        is_off = value == field_value(sections, self.target, self.off) if self.off else not is_on
        return to_flag(said) != is_off


def field_value(sections: type[Section], key: str, value: object) -> object:
    """What a value of a key means to its field.

    Raises:
        ConfigError: nothing.
    """
    section, _, name = key.partition(".")
    cls = sections.section_of(section)
    if cls is None or name not in cls.field_names():
        return value
    return getattr(cls(**{name: value}), name)


SFT_NAMES = ("packing", "completion_only_loss", "assistant_only_loss", "chat_template_path")
_RECOMPUTE = "sharding.activation_checkpointing"

MOVES = (
    Move("strategy", "sharding.strategy"),
    Move("training.ddp_timeout", "launch.timeout"),
    Move("training.dataset_text_field", "data.text_column"),
    Move("training.activation_checkpointing", _RECOMPUTE),
    *(Move(f"training.{name}", f"sft.{name}") for name in SFT_NAMES),
    Move("training.bf16", "sharding.param_dtype", on="bfloat16"),
    Move("training.fp16", "sharding.param_dtype", on="float16"),
    Move("training.tf32", "training.matmul_precision", on="high", off="highest"),
    Move("training.gradient_checkpointing", _RECOMPUTE, on="block", off="none"),
)


def apply_moves(
    sections_of: type[Section], values: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Problem]]:
    """Every source's meaning at its target.

    Args:
        sections_of: the class whose fields are the sections.
        values: sections by name, as mappings, Section objects, or anything else (which is left for
            the schema to refuse).

    Returns:
        The sections, and every source that contradicts its target.
    """
    sections = {name: _plain(name, value) for name, value in values.items()}
    problems = [problem for move in MOVES if (problem := _apply(move, sections_of, sections))]
    return sections, problems


def _plain(name: str, value: object) -> object:
    """A section as a mapping of its own that may be changed; `data: FILE` as one of its path."""
    if isinstance(value, Section):
        return {field: getattr(value, field) for field in value.model_fields_set}
    if isinstance(value, Mapping):
        return dict(cast("Mapping[str, object]", value))
    return {"path": value} if name == "data" and isinstance(value, str) else value


def _apply(move: Move, sections_of: type[Section], sections: dict[str, Any]) -> Problem | None:
    source, source_key = _holder(move.source, sections)
    if source is None or source_key not in source:
        return None
    target, target_key = _holder(move.target, sections, make=True)
    if target is None:
        return None  # the section is no mapping, which the schema refuses
    said = source[source_key] if move.stays else source.pop(source_key)
    other = target.get(target_key)
    try:
        if other is None:
            implied = move.implied(said)
            if implied is not None:
                target[target_key] = implied
            return None
        if move.agrees(sections_of, said, other):
            return None
    except (Rejected, ConfigProblems):
        if move.stays:
            return None  # one of the two means nothing, which its own field says in its own words
    got = show(said)
    return Problem(
        move.source, f"what {move.target} says, {show(other)}", got, "Give one of the two"
    )


def _holder(
    key: str, sections: dict[str, Any], *, make: bool = False
) -> tuple[dict[str, Any] | None, str]:
    """The mapping that holds a dotted key, and the key's last part."""
    section, _, name = key.rpartition(".")
    if not section:
        return sections, name
    if make and sections.get(section) is None:
        sections[section] = {}
    held = sections.get(section)
    return (cast("dict[str, Any]", held) if isinstance(held, dict) else None), name
