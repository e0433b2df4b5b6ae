"""Hugging Face's TrainingArguments, under `training:` or flat, and TRL's script arguments.

Most names are fields of TrainingConfig. This table has the others: `fsdp`, `fsdp_config`,
`deepspeed`, and names without effect or support (keys.yaml).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

from fullshard.config.dialects.accelerate import FSDP, MESH
from fullshard.config.dialects.deepspeed import DEEPSPEED
from fullshard.config.fields import Rejected, means_same, to_flag
from fullshard.config.keys import canonical
from fullshard.config.rules import (
    NOTHING,
    Meaning,
    Rule,
    Said,
    Status,
    Table,
    axes,
    file_rule,
    happens,
    is_empty,
    is_neutral,
    mapping_of,
    no_effect,
    rows,
    to,
    translated,
    unless,
)
from fullshard.config.schema import TrainingConfig
from fullshard.config.training import MOVED, names
from fullshard.config.values import Strategy, did_you_mean, spellings, words_of

_WORDS = ("auto_wrap", "offload")


@unless()
def _fsdp(value: object, said: Said) -> Meaning:
    """Reads `full_shard auto_wrap offload` as text or list, or FSDP2's flag.

    A mapping is read as an `fsdp_config`.
    """
    try:
        on = to_flag(value)
    except Rejected:
        return _fsdp_words(value)
    if not on:
        return Meaning(Status.NO_EFFECT, "sharding.strategy decides, with or without it")
    if _names_strategy(said.get("fsdp_config")):
        return Meaning(Status.NO_EFFECT, "fsdp_config names the strategy")
    return translated({"sharding.strategy": Strategy.FULL_SHARD})


def _fsdp_words(value: object) -> Meaning:
    members = cast("Iterable[object]", value) if isinstance(value, list) else (value,)
    parts = [p for m in members for p in str(getattr(m, "value", m)).replace(",", " ").split()]
    known = {**spellings(Strategy), **dict.fromkeys(_WORDS, None)}
    own = (*(strategy.value for strategy in Strategy if strategy is not Strategy.AUTO), *_WORDS)
    values: dict[str, object] = {}
    for part in parts:
        word = next((word for word in words_of(part) if word in known), "")
        if not word:
            raise Rejected(f"words among {', '.join(own)}", did_you_mean(part, own))
        if word == "offload":
            values["sharding.offload"] = "cpu"
        elif word not in _WORDS:
            if "sharding.strategy" in values:
                raise Rejected("one strategy, and auto_wrap and offload")
            values["sharding.strategy"] = known[word]
    if not values:  # only `auto_wrap`
        return Meaning(Status.NO_EFFECT, "units are found in every model")
    return translated(values)


def _names_strategy(config: object) -> bool:
    names = {str(key).removeprefix("fsdp_") for key in mapping_of(config)}
    return bool(names & {"sharding_strategy", "reshard_after_forward"})


def _min_params(value: object, said: Said) -> Meaning:
    if is_neutral(value, (0,)) or not is_empty(said.get("fsdp_transformer_layer_cls_to_wrap")):
        return happens("sharding.wrap")
    return translated({"sharding.wrap": "size", "sharding.wrap_min_params": value})


def _decides(name: str, target: str) -> Rule:
    """A flag that sets a key of `sharding` (`bf16`) and is kept."""

    def rule(value: object, _: Said) -> Meaning:
        if value is None:
            return NOTHING
        why = f"decides {target}" if words_of(value)[:1] == ("true",) else "it is off"
        status = Status.TRANSLATED if "decides" in why else Status.NO_EFFECT
        return Meaning(status, why, {f"training.{name}": value})

    return rule


def _use_peft(value: object, said: Said) -> Meaning:
    if is_empty(value) or not to_flag(value):
        return happens("lora.r")
    return translated({"lora.r": 16 if is_empty(said.get("lora_r")) else said["lora_r"]})


def lora_keys(is_on: Callable[[Said], bool], off: str) -> dict[str, Rule]:
    """Rules for `lora_*`, which apply if another key enables adapters; `off`: the reason if not."""

    def rule_of(name: str) -> Rule:
        def rule(value: object, said: Said) -> Meaning:
            if is_empty(value) or not is_on(said):
                return Meaning(Status.NO_EFFECT, off)
            if means_same(value, "all-linear"):
                return happens("lora.target_modules")
            return translated({f"lora.{name}": value})

        return rule

    names = {"lora_r": "r", "lora_target_modules": "target_modules"}
    names |= {name: name for name in ("lora_alpha", "lora_dropout")}
    return {theirs: rule_of(ours) for theirs, ours in names.items()}


_LORA: Table = {
    "use_peft": _use_peft,
    **lora_keys(lambda said: to_flag(said.get("use_peft") or False), "use_peft is off"),
    "lora_task_type": no_effect("causal language models are trained"),
}


# transformers' `distributed_config`.
DISTRIBUTED: Table = {
    **axes("dp_replicate_size", "fsdp_size", "tp_size", "ep_size"),
    **rows("DISTRIBUTED"),
}

# Names below `training:` other than fields of TrainingConfig.
TRAINING: Table = {
    **names(),
    **{name: _decides(name, move.target) for name, move in MOVED.items() if move.stays},
    "fsdp": {"": _fsdp, **FSDP},
    "fsdp_config": FSDP,
    "fsdp_min_num_params": _min_params,
    "fsdp_transformer_layer_cls_to_wrap": to("sharding.wrap", read=lambda name: [name]),
    "deepspeed": {"": file_rule, **DEEPSPEED},
    "parallelism_config": MESH,
    "distributed_config": DISTRIBUTED,
    **_LORA,
}


def _field(name: str) -> Rule:
    """A field of TrainingConfig, or the key of another section that it sets."""
    key = canonical(f"training.{name}")

    def rule(value: object, _: Said) -> Meaning:
        return NOTHING if value is None else translated({key: value})

    return rule


# A flat file of these names, with or without TRL's script and model arguments.
FLAT: Table = {
    **rows("FLAT"),
    **{
        name: _field(name)
        for name in (*TrainingConfig.field_names(), *TrainingConfig.ALIASES, *MOVED)
        if name not in TRAINING
    },
    **TRAINING,
}

# A name that our own files do not have at the top level.
FLAT_MARKS = frozenset(FLAT) - {"model", "data"}
