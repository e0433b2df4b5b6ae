"""DeepSpeed's JSON: ZeRO's stages, offload, batch, precision, optimizer and schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from fullshard.config.fields import Rejected, to_flag, to_number
from fullshard.config.rules import (
    Meaning,
    Rule,
    Said,
    Status,
    Table,
    axes,
    each,
    happens,
    is_auto,
    is_empty,
    mapping_of,
    rows,
    translated,
    unless,
    word_among,
)
from fullshard.config.values import words_of

HOMES: Mapping[str, object] = {"none": None, "cpu": "cpu", "nvme": "nvme"}

_STAGES = {
    "0": ("no_shard", "stage 0 replicates everything"),
    "1": ("shard_grad_op", "stage 1, with gradients sharded too: less memory, the same losses"),
    "2": ("shard_grad_op", "stage 2"),
    "3": ("full_shard", "stage 3"),
}


@unless()
def stage(value: object, said: Said) -> Meaning:
    """A ZeRO stage; with MiCS it is sharded within a group."""
    if is_auto(value):
        return Meaning(Status.NO_EFFECT, "auto: sharding.strategy decides")
    strategy, why = _STAGES[word_among(value, _STAGES)]
    group = to_number(said.get("mics_shard_size"))
    if group is not None and group > 0:
        return translated({"sharding.strategy": "hybrid_shard"}, "mics_shard_size makes copies")
    return translated({"sharding.strategy": strategy}, why)


def _zero(value: object, said: Said) -> Meaning:
    """`zero_optimization: true` is stage 1; `{}` has no stage."""
    if is_empty(value):
        return Meaning(Status.NO_EFFECT, "it has no stage: sharding.strategy decides")
    return stage("1" if to_flag(value) else "0", said)


@unless()
def home(value: object, said: Said) -> Meaning:
    """The memory of DeepSpeed's parameters, or of optimizer states with gradients.

    torch's optimizers update parameters in place, so here all state is offloaded.
    """
    if HOMES[word_among(value, HOMES)] is None:
        return happens("sharding.offload")
    why = "parameters, gradients and optimizer state are offloaded together"
    parameters, optimizer = _device(said, "offload_param"), _device(said, "offload_optimizer")
    if "nvme" not in (parameters, optimizer):
        return translated({"sharding.offload": "cpu"}, why)
    homes = {"parameters": parameters, "gradients": optimizer, "optimizer": optimizer}
    return translated({f"sharding.offload.{key}": home for key, home in homes.items()}, why)


def _device(said: Said, key: str) -> object:
    """The device, from a nested or flat key; an invalid value is reported by its own rule."""
    value = mapping_of(said.get(key)).get("device", said.get(f"{key}_device"))
    return next((HOMES[word] for word in words_of(value) if HOMES.get(word)), "cpu")


def nvme_path(key: str) -> Rule:
    """The NVMe folder, if the key `offload_*` uses NVMe."""

    @unless("none")
    def rule(value: object, said: Said) -> Meaning:
        if _device(said, key) != "nvme":
            return Meaning(Status.NO_EFFECT, "the device is not nvme")
        why = "unnamed files in it, which disappear when the run ends"
        return translated({"sharding.offload.folder": value}, why)

    return rule


def _old_offload(value: object, said: Said) -> Meaning:
    return home("cpu" if to_flag(value) else "none", said)


def _betas(value: object, _: Said) -> Meaning:
    if is_auto(value):
        return Meaning(Status.NO_EFFECT, "auto: training.adam_beta1 and adam_beta2 decide")
    betas = cast("list[object]", value) if isinstance(value, list) else []
    if len(betas) != 2:
        raise Rejected("two numbers")
    return translated({"training.adam_beta1": betas[0], "training.adam_beta2": betas[1]})


def _autocast(value: object, said: Said) -> Meaning:
    enabled = said.get("enabled")
    if is_empty(enabled) or not to_flag(enabled):
        return Meaning(Status.NO_EFFECT, "torch_autocast is off")
    return translated({"sharding.param_dtype": value}, "units compute in it")


ZERO: Table = {
    **rows("ZERO"),
    "stage": stage,
    **{
        key: {"device": home, "nvme_path": nvme_path(key), **rows("OFFLOAD")}
        for key in ("offload_optimizer", "offload_param")
    },
    **each(_old_offload, "cpu_offload cpu_offload_params cpu_offload_param"),
}


@unless(1)
def _autoep(value: object, said: Said) -> Meaning:
    """DeepSpeed's group of experts; the tensor axis is in another table."""
    if not to_flag(said.get("enabled", True)):
        return Meaning(Status.NO_EFFECT, "it is off")
    tensor = mapping_of(said.get("tensor_parallel"))
    beside = {"autoep_size": value, "autotp_size": tensor.get("autotp_size")}
    return axes("", "", "autotp_size", "autoep_size")["autoep_size"](value, beside)


# DeepSpeed's `tensor_parallel` and `expert_parallel`.
AUTO_TP: Table = {"tp": rows("TP"), **rows("AUTO_TP")}
AUTO_EP: Table = {"autoep_size": _autoep, **rows("AUTO_EP")}


DEEPSPEED: Table = {
    **rows("DEEPSPEED"),  # keys.yaml: those without code
    "zero_optimization": {"": _zero, **ZERO},
    "bf16": rows("BF16"),
    "fp16": rows("FP16"),
    "torch_autocast": {"dtype": _autocast, **rows("AUTOCAST")},
    "data_types": rows("DATA_TYPES"),
    "tensor_parallel": AUTO_TP,
    "expert_parallel": AUTO_EP,
    "optimizer": {"params": {"betas": _betas, **rows("OPTIMIZER_PARAMS")}, **rows("OPTIMIZER")},
    "scheduler": {"params": rows("SCHEDULER_PARAMS"), **rows("SCHEDULER")},
}
