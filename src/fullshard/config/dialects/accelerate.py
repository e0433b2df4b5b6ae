"""Accelerate's YAML: the machines, and `fsdp_config` or `deepspeed_config`.

The Trainer and axolotl also have the keys of `fsdp_config`, with or without `fsdp_`.
"""

from __future__ import annotations

from collections.abc import Mapping

from fullshard.config.dialects.deepspeed import home, nvme_path, stage
from fullshard.config.fields import Rejected, to_flag, to_names
from fullshard.config.rules import (
    Meaning,
    Said,
    Status,
    Table,
    axes,
    choice,
    each,
    file_rule,
    is_empty,
    is_neutral,
    refused,
    rows,
    to,
    translated,
    unless,
    word_among,
)
from fullshard.config.values import Strategy, parse, words_of

_WRAP: Mapping[str, str] = {
    **dict.fromkeys(("transformer_based_wrap", "1"), "transformer"),
    **dict.fromkeys(("size_based_wrap", "2"), "size"),
    **dict.fromkeys(("no_wrap", "3"), "none"),
}
_BACKWARD: Mapping[str, object] = {
    **dict.fromkeys(("backward_pre", "1"), 1),
    **dict.fromkeys(("backward_post", "no_prefetch", "none", "2", "3"), 0),
}

_strategy = to("sharding.strategy")


@unless()
def _reshard(value: object, said: Said) -> Meaning:
    """Reads FSDP2's flag, or FSDP1's strategy under FSDP2's name."""
    try:
        word: object = Strategy.FULL_SHARD if to_flag(value) else Strategy.SHARD_GRAD_OP
    except Rejected:
        return _strategy(value, said)
    named = said.get("sharding_strategy")
    if is_empty(named):
        return translated({"sharding.strategy": word}, f"FSDP2's flag for {word}")
    hybrids = {
        Strategy.HYBRID_SHARD: Strategy.FULL_SHARD,
        Strategy.HYBRID_SHARD_ZERO2: Strategy.SHARD_GRAD_OP,
    }
    strategy = parse(Strategy, named, "")
    if hybrids.get(strategy, strategy) is not word:
        raise Rejected(f"the value of sharding_strategy, {strategy}", "Give one of the two")
    return Meaning(Status.NO_EFFECT, "sharding_strategy has the same meaning")


def _policy(said: Said) -> str:
    """The wrap for a policy; empty if the policy is absent or invalid."""
    words = words_of(said.get("auto_wrap_policy"))
    return next((_WRAP[word] for word in words if word in _WRAP), "")


@unless()
def _auto_wrap_policy(value: object, said: Said) -> Meaning:
    policy = _WRAP[word_among(value, _WRAP)]
    if policy == "transformer" and not is_empty(said.get("transformer_layer_cls_to_wrap")):
        return Meaning(Status.NO_EFFECT, "transformer_layer_cls_to_wrap names the units")
    return translated({"sharding.wrap": policy})


@unless()
def _layer_classes(value: object, said: Said) -> Meaning:
    if _policy(said) in ("size", "none"):
        return Meaning(Status.NO_EFFECT, "auto_wrap_policy chooses the units in another way")
    return translated({"sharding.wrap": list(to_names(value))})


@unless(0)
def _min_num_params(value: object, said: Said) -> Meaning:
    policy = _policy(said)
    named = not is_empty(said.get("transformer_layer_cls_to_wrap"))
    if policy in ("transformer", "none") or (named and not policy):
        return Meaning(Status.NO_EFFECT, "it applies to SIZE_BASED_WRAP only")
    values = {"sharding.wrap_min_params": value}
    return translated(values if policy else {"sharding.wrap": "size", **values})


def _backward_prefetch(value: object, said: Said) -> Meaning:
    """Reads the prefetch; null disables it, like torch's `backward_prefetch=None`."""
    word = "none" if value is None else value
    return choice("sharding.backward_prefetch", _BACKWARD, "a depth in units")(word, said)


def _globs(value: object) -> list[str]:
    """Converts Accelerate's regular expressions for full names to globs."""
    parts = [part for name in to_names(value) for part in name.split("|")]
    globs = [part.replace("\\.", ".").replace(".*", "*").strip("()^$") for part in parts]
    if any(set(glob) & set("\\[](){}+?^$") for glob in globs):
        raise Rejected("names of modules, with .* and | as the only wildcards")
    return globs


FSDP: Table = {
    **rows("FSDP"),
    "sharding_strategy": _strategy,
    "reshard_after_forward": _reshard,
    "auto_wrap_policy": _auto_wrap_policy,
    "transformer_layer_cls_to_wrap": _layer_classes,
    "min_num_params": _min_num_params,
    **each(_backward_prefetch, "backward_prefetch backward_prefetch_policy"),
    "ignored_modules": to("sharding.ignore", "as globs", read=_globs),
}

# The strategy of each type; None: given by that engine's configuration.
_DDP = "multi_gpu multi_cpu multi_xpu multi_npu multi_mlu multi_hpu no"
_TYPES: Mapping[str, str | None] = {
    **dict.fromkeys(("fsdp", "deepspeed"), None),
    **dict.fromkeys(_DDP.split(), "no_shard"),
}
_TYPES_LATER = ("megatron_lm", "xla", "tpu")


def _distributed_type(value: object, said: Said) -> Meaning:
    if not is_empty(value) and is_neutral(value, _TYPES_LATER):
        raise refused(value, "Use FSDP")
    word = word_among(value, _TYPES)
    strategy = _TYPES[word]
    if strategy is None:
        engine = "fsdp_config" if word == "fsdp" else "deepspeed_config"
        return Meaning(Status.TRANSLATED, f"fullshard's engine runs the settings of {engine}")
    values: dict[str, object] = {"sharding.strategy": strategy}
    if word == "no" and is_empty(said.get("num_processes")):
        values["launch.num_processes"] = 1
    return translated(values, "every rank stores everything")


DEEPSPEED_PLUGIN: Table = {
    **rows("DEEPSPEED_PLUGIN"),
    "zero_stage": stage,
    **each(home, "offload_optimizer_device offload_param_device"),
    "offload_optimizer_nvme_path": nvme_path("offload_optimizer"),
    "offload_param_nvme_path": nvme_path("offload_param"),
    "deepspeed_config_file": file_rule,
}

# Accelerate's `parallelism_config`, also in axolotl's file.
MESH: Table = {
    **axes("dp_replicate_size", "dp_shard_size", "tp_size", "ep_size"),
    **rows("MESH"),
}

ACCELERATE: Table = {
    **rows("ACCELERATE"),
    "distributed_type": _distributed_type,
    "fsdp_config": FSDP,
    "deepspeed_config": DEEPSPEED_PLUGIN,
    "parallelism_config": MESH,
}
