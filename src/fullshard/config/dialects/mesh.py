"""The axes of a mesh under the names of other tools.

    tool             replicate             shard            tensor           expert
    transformers     dp_replicate_size     fsdp_size        tp_size          ep_size
    Accelerate       dp_replicate_size     dp_shard_size    tp_size          ep_size
    torchtitan       data_parallel_...     data_parallel_.. tensor_par...    expert_parallel_degree
    DeepSpeed                                               autotp_size      autoep_size

Accelerate's cp_size and sp_size, and torchtitan's context_parallel_degree, are our `context`.

Other tools count the ranks that divide the experts among those of the shard and tensor axes. Here
they are an axis of their own: of shard 4 x tensor 2 with ep_size 4, it is shard 2 x expert 2 x
tensor 2.
"""

from __future__ import annotations

from fullshard.config.dialects.rules import (
    Meaning,
    Rule,
    Said,
    Status,
    Table,
    mapping_of,
    rows,
    to,
    translated,
    unless,
)
from fullshard.config.fields import Rejected, to_flag, to_number

_TENSOR_PLAN = "the tensor plan cuts the experts over the same ranks"


def _size(value: object) -> int:
    """A size, or 1 for a value that is none; the key's own rule reports it."""
    found = to_number(value)
    return int(found) if found is not None and found >= 1 and found == int(found) else 1


def _expert(said: Said, tensor: str, expert: str) -> int:
    """Our expert axis."""
    return max(1, _size(said.get(expert)) // _size(said.get(tensor)))


def axes(replicate: str, shard: str, tensor: str, expert: str) -> dict[str, Rule]:
    """Rules for the sizes of four axes under a tool's names."""

    @unless(1)
    def of_expert(value: object, said: Said) -> Meaning:
        size, beside = _size(value), _size(said.get(tensor))
        if beside == 1:
            return translated({"sharding.expert": value})
        if size % beside:
            raise Rejected(f"a multiple of {tensor}, {beside}")
        if size == beside:
            return Meaning(Status.NO_EFFECT, _TENSOR_PLAN)
        return translated({"sharding.expert": size // beside}, f"{expert} / {tensor}")

    @unless(-1, 0)
    def of_shard(value: object, said: Said) -> Meaning:
        size, groups = _size(value), _expert(said, tensor, expert)
        if groups == 1:
            return translated({"sharding.shard": value})
        if size % groups:
            raise Rejected(f"a multiple of {groups}, over whose groups of ranks experts are spread")
        return translated({"sharding.shard": size // groups}, f"sharding.expert is {groups} of it")

    sizes = {shard: of_shard, tensor: to("sharding.tensor", "", 1), expert: of_expert}
    return {replicate: to("sharding.replicate", "", -1, 0), **sizes}


# Accelerate's `parallelism_config`, also in axolotl's file.
MESH: Table = {
    **axes("dp_replicate_size", "dp_shard_size", "tp_size", "ep_size"),
    **rows("MESH"),
}

# transformers' `distributed_config`.
DISTRIBUTED: Table = {
    **axes("dp_replicate_size", "fsdp_size", "tp_size", "ep_size"),
    **rows("DISTRIBUTED"),
}

# torchtitan's `parallelism`.
TORCHTITAN: Table = {
    **axes(
        "data_parallel_replicate_degree",
        "data_parallel_shard_degree",
        "tensor_parallel_degree",
        "expert_parallel_degree",
    ),
    **rows("TORCHTITAN"),
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
