"""Keys whose meaning lives under another key: `training.bf16` is a dtype of `sharding`.

    strategy                          sharding.strategy
    training.bf16, training.fp16      sharding.param_dtype: bfloat16, float16
    training.gradient_checkpointing   sharding.activation_checkpointing: block
    training.activation_checkpointing                 (its name in transformers 5)
    training.ddp_timeout              launch.timeout
    training.dataset_text_field       data.text_column
    training.packing ...              sft.packing ... (what else of TRL's SFT_NAMES stands there)

Where both are given they have to agree. The keys of the first column that are Hugging Face's own
flags stay in TrainingConfig, as they were given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from fullshard.config.fields import Rejected, means_same, to_flag, to_number
from fullshard.config.model import Section
from fullshard.config.problems import ConfigProblems, Problem, show
from fullshard.config.values import DType, RecomputeKind, Strategy, parse
from fullshard.config.values import parse_recompute as read_recompute


@dataclass(frozen=True)
class Move:
    """One row of the table above.

    Args:
        source: dotted key as people write it.
        target: dotted key that has the meaning.
        implied: the target's value for the source's value; None where it implies nothing.
        agrees: whether a value of the target is what the source says.
        stays: the source is a field of its own section too.
    """

    source: str
    target: str
    implied: Callable[[Any], object]
    agrees: Callable[[Any, Any], bool]
    stays: bool = False


def _itself(value: object) -> object:
    return value


def _same_strategy(source: object, target: object) -> bool:
    return parse(Strategy, source, "") is parse(Strategy, target, "")


def _same_recompute(source: object, target: object) -> bool:
    return read_recompute(source, "") == read_recompute(target, "")


def _same_number(source: object, target: object) -> bool:
    return to_number(source) == to_number(target)


def _same_value(source: object, target: object) -> bool:
    return means_same(source, target)


def _same_text(source: object, target: object) -> bool:
    return source == target


def _if_set(member: object, flag: object) -> object:
    return member if flag is not None and to_flag(flag) else None


def _dtype_agrees(member: DType, flag: object, target: object) -> bool:
    return flag is None or to_flag(flag) == (parse(DType, target, "") is member)


def _checkpointing_agrees(flag: object, target: object) -> bool:
    off = read_recompute(target, "").kind is RecomputeKind.NONE
    return flag is None or to_flag(flag) != off


SFT_NAMES = ("packing", "completion_only_loss", "assistant_only_loss", "chat_template_path")

MOVES = (
    Move("strategy", "sharding.strategy", _itself, _same_strategy),
    Move("training.ddp_timeout", "launch.timeout", _itself, _same_number),
    Move("training.dataset_text_field", "data.text_column", _itself, _same_text),
    Move(
        "training.activation_checkpointing",
        "sharding.activation_checkpointing",
        _itself,
        _same_recompute,
    ),
    *(Move(f"training.{name}", f"sft.{name}", _itself, _same_value) for name in SFT_NAMES),
    *(
        Move(
            f"training.{flag}",
            "sharding.param_dtype",
            partial(_if_set, dtype.value),
            partial(_dtype_agrees, dtype),
            stays=True,
        )
        for flag, dtype in (("bf16", DType.BFLOAT16), ("fp16", DType.FLOAT16))
    ),
    Move(
        "training.gradient_checkpointing",
        "sharding.activation_checkpointing",
        partial(_if_set, "block"),
        _checkpointing_agrees,
        stays=True,
    ),
)


def apply_moves(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Every source's meaning at its target.

    Args:
        values: sections by name, as mappings, Section objects, or anything else (which is left for
            the schema to refuse).

    Returns:
        The sections, and every source that contradicts its target.
    """
    sections = {name: _plain(name, value) for name, value in values.items()}
    problems = [problem for move in MOVES if (problem := _apply(move, sections)) is not None]
    return sections, problems


def _plain(name: str, value: object) -> object:
    """A section as a mapping of its own that may be changed; `data: FILE` as one of its path."""
    if isinstance(value, Section):
        return {field: getattr(value, field) for field in value.model_fields_set}
    if isinstance(value, Mapping):
        return dict(cast("Mapping[str, object]", value))
    return {"path": value} if name == "data" and isinstance(value, str) else value


def _apply(move: Move, sections: dict[str, Any]) -> Problem | None:
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
        if said is None or move.agrees(said, other):
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
