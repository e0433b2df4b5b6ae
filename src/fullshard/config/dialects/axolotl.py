"""axolotl's YAML: model, data, training and fsdp_config or deepspeed in one file."""

from __future__ import annotations

from typing import cast

from fullshard.config.dialects.accelerate import FSDP
from fullshard.config.dialects.trainer import FLAT, lora_keys
from fullshard.config.fields import Rejected, means_same, to_number
from fullshard.config.rules import (
    NOTHING,
    Meaning,
    Rule,
    Said,
    Status,
    Table,
    axes,
    each,
    is_auto,
    is_empty,
    is_neutral,
    mapping_of,
    refused,
    rows,
    translated,
    unless,
)


def _times_an_epoch(kind: str) -> Rule:
    """Converts `evals_per_epoch: 2` to a fraction of all steps."""

    @unless(0)
    def rule(value: object, said: Said) -> Meaning:
        if kind == "save" and value == 1:
            return translated({"training.save_strategy": "epoch"})
        times, all_epochs = to_number(value), to_number(said.get("num_epochs")) or 1
        if times is None or times <= 0:
            raise Rejected("a number > 0")
        share = min(1 / (times * all_epochs), 0.999)
        return translated({f"training.{kind}_steps": share}, "as a share of all steps")

    return rule


def _precision(name: str) -> Rule:
    @unless(False)
    def rule(value: object, _: Said) -> Meaning:
        if is_auto(value):
            return translated({f"training.{name}": True}, "axolotl checks the GPU; here it is on")
        return translated({f"training.{name}": value})

    return rule


# Keys of a data set that select a part of it, and the values that select all.
_PARTS = {"split": "train", "shards": 1, "shards_idx": 0, "skip": 0, "data_files": "", "name": ""}


def _datasets(value: object, _: Said) -> Meaning:
    if value is None:
        return NOTHING
    members = cast("list[object]", value) if isinstance(value, list) else [value]
    entry = mapping_of(members[0] if members else None)
    if is_empty(entry.get("path")):
        raise Rejected("a list of mappings with path")
    for part, everything in _PARTS.items():
        if not is_neutral(entry.get(part), (everything,)):
            raise refused(f"{part}: {entry[part]}", "Set path to a file of that part")
    why = "as plain text" + (", the first of the list" if len(members) > 1 else "")
    if entry.get("type") not in (None, "completion", "pretrain"):
        why += "; `fullshard sft` reads conversations, by their columns"
    values: dict[str, object] = {"data.path": entry["path"]}
    for name in ("field", "text_column"):
        if not is_empty(entry.get(name)):
            values["data.text_column"] = entry[name]
    return translated(values, why)


@unless("", False)
def _adapter(value: object, said: Said) -> Meaning:
    """Reads axolotl's adapter type."""
    if means_same(value, "lora"):
        return translated({"lora.r": 16 if is_empty(said.get("lora_r")) else said["lora_r"]})
    raise refused(value, "Write lora, or leave it out")


def _packing(value: object, _: Said) -> Meaning:
    if is_neutral(value, (False,)):
        return Meaning(Status.NO_EFFECT, "plain text is always packed, conversations are not")
    return translated({"sft.packing": value})


AXOLOTL: Table = {
    **rows("AXOLOTL", FLAT),
    "evals_per_epoch": _times_an_epoch("eval"),
    "saves_per_epoch": _times_an_epoch("save"),
    **each(_precision("bf16"), "bf16 bfloat16"),
    **each(_precision("fp16"), "fp16 float16"),
    "tf32": _precision("tf32"),
    **each(_datasets, "datasets pretraining_dataset"),
    "fsdp_config": FSDP,
    **axes("dp_replicate_size", "dp_shard_size", "tensor_parallel_size", "expert_parallel_size"),
    "sample_packing": _packing,
    "adapter": _adapter,
    **lora_keys(lambda said: means_same(said.get("adapter"), "lora"), "adapter is not lora"),
}
