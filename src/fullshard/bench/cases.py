"""The model shapes and engines of `bench step`, as data that imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Literal

from fullshard.errors import ConfigError

Kind = Literal["gpt", "moe", "lora"]
Compute = Literal["float32", "bfloat16"]

NUM_EXPERTS, NUM_CHOSEN = 8, 2  # "moe": experts per block, and experts per token
ADAPTER_RANK = 8  # "lora": rank of the adapters on qkv and out of every block


@dataclass(frozen=True)
class Case:
    """One model on one number of ranks.

    Attributes:
        batch: Sequences per rank and step.
        seq: Tokens per sequence.
        kind: "gpt"; "moe", whose feed-forwards are experts; "lora", a frozen GPT with adapters.
        compute: Dtype of forward and backward; parameters and optimizer are float32.
    """

    name: str
    width: int
    layers: int
    vocab: int
    batch: int
    seq: int
    num_ranks: int
    kind: Kind = "gpt"
    compute: Compute = "float32"

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all ranks in one step."""
        return self.num_ranks * self.batch * self.seq

    @property
    def numel(self) -> int:
        """Parameters of the model."""
        width = self.width
        feed_forward = 8 * width**2 + 5 * width
        block = 4 * width**2 + 8 * width + feed_forward
        if self.kind == "moe":
            block += (NUM_EXPERTS - 1) * feed_forward + NUM_EXPERTS * width
        elif self.kind == "lora":
            block += 6 * ADAPTER_RANK * width
        return self.layers * block + 2 * self.vocab * width + 2 * width

    def describe(self) -> str:
        """Returns the shape in one line."""
        return (
            f"{self.name}: {MODELS[self.kind]} of width {self.width} and {self.layers} blocks, "
            f"{self.num_ranks} ranks, {self.batch} x {self.seq} tokens per rank, {self.compute}"
        )


MODELS: dict[Kind, str] = {
    "gpt": "GPT",
    "moe": f"GPT with {NUM_CHOSEN} of {NUM_EXPERTS} experts per token",
    "lora": f"frozen GPT with adapters of rank {ADAPTER_RANK}",
}
_109M = Case("109M", width=1024, layers=8, vocab=4096, batch=1, seq=128, num_ranks=2)

CASES = {
    case.name: case
    for case in (
        Case("tiny", width=64, layers=2, vocab=128, batch=2, seq=16, num_ranks=2),
        Case("29M", width=512, layers=8, vocab=4096, batch=2, seq=256, num_ranks=2),
        _109M,
        Case("29M-4", width=512, layers=8, vocab=4096, batch=1, seq=128, num_ranks=4),
        replace(_109M, name="109M-bf16", compute="bfloat16"),
        Case("moe", width=256, layers=6, vocab=4096, batch=2, seq=256, num_ranks=2, kind="moe"),
        replace(_109M, name="lora", kind="lora"),
    )
}
DEFAULT_CASES = ("29M", "109M", "29M-4", "109M-bf16", "moe", "lora")

OURS, REFERENCE, FLOOR = "fullshard", "fsdp2", "floor"
CORE = (OURS, REFERENCE, FLOOR)
# Bytes per parameter of an unsharded rank: AdamW's 16, or the weight of a frozen base; plus
# activations.
TRAINED_BYTES, FROZEN_BYTES = 20, 8


@dataclass(frozen=True)
class Peer:
    """One engine of the comparison.

    Attributes:
        package: Import name of the package that it needs.
        trains: False for the floor, whose losses mean nothing.
    """

    name: str
    strategy: str
    package: str
    about: str
    trains: bool = True


PEERS = {
    peer.name: peer
    for peer in (
        Peer("fullshard", "full_shard", "fullshard", "ours, (C) shared home"),
        Peer("fullshard-direct", "full_shard", "fullshard", "ours, (B) parts sent directly"),
        Peer("fullshard-c10d", "full_shard", "fullshard", "ours, (A) gloo's own collectives"),
        Peer("fsdp2", "full_shard", "torch", "fully_shard per block, reshard_after_forward=True"),
        Peer("fsdp2-zero2", "shard_grad_op", "torch", "the same, reshard_after_forward=False"),
        Peer("fsdp1", "full_shard", "torch", "FullyShardedDataParallel, use_orig_params=True"),
        Peer("ddp", "no_shard", "torch", "DistributedDataParallel, gradient_as_bucket_view=True"),
        Peer("deepspeed", "full_shard", "deepspeed", "DeepSpeed ZeRO stage 3"),
        Peer("deepspeed-zero2", "shard_grad_op", "deepspeed", "DeepSpeed ZeRO stage 2"),
        Peer("floor", "none", "torch", "no communication, 1/W of the optimizer", trains=False),
    )
}


# Engines that cannot run a case of this dtype beside the others, and why.
UNFIT: dict[tuple[str, Compute], str] = {
    ("ddp", "bfloat16"): "it has no bfloat16 compute; autocast keeps norms and sums in float32, "
    "which is another arithmetic",
    ("deepspeed", "bfloat16"): "its bfloat16 mode has an optimizer of its own",
    ("deepspeed-zero2", "bfloat16"): "its bfloat16 mode has an optimizer of its own",
}


def unfit_of(case: Case, peers: Sequence[Peer]) -> dict[str, str]:
    """Returns the names of the engines that cannot run the case, each with the reason."""
    reasons = {peer.name: UNFIT.get((peer.name, case.compute)) for peer in peers}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def installed_peers(names: tuple[str, ...]) -> tuple[list[Peer], list[str]]:
    """Splits engine names into the peers that can run here and the names that are absent."""
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise ConfigError(f"engine: expected one of {', '.join(PEERS)}, got {unknown[0]!r}.")
    wanted = [PEERS[name] for name in dict.fromkeys(names)]
    present = [peer for peer in wanted if find_spec(peer.package) is not None]
    return present, [peer.name for peer in wanted if peer not in present]


def groups_of(peers: Sequence[Peer], case: Case, budget_bytes: int) -> list[tuple[Peer, ...]]:
    """Divides engines into groups that fit into memory at the same time.

        all fit    [fullshard, fsdp2, floor, ddp, fsdp1]
        three fit  [fullshard, fsdp2, floor]  [fsdp2, ddp, fsdp1]
        no engine  none

    Ours, FSDP2 and the floor are in the first group. FSDP2 is in every group, since all ratios are
    relative to it.
    """
    a_parameter = FROZEN_BYTES if case.kind == "lora" else TRAINED_BYTES
    engine_bytes = a_parameter * case.numel * case.num_ranks
    size = max(len(CORE), budget_bytes // engine_bytes)
    if len(peers) <= size:
        return [tuple(peers)] if peers else []
    core = [peer for peer in peers if peer.name in CORE]
    rest = [peer for peer in peers if peer.name not in CORE]
    pair = [peer for peer in core if peer.name == REFERENCE]
    num_first, num_later = size - len(core), size - len(pair)
    later = rest[num_first:]
    return [
        (*core, *rest[:num_first]),
        *((*pair, *later[i : i + num_later]) for i in range(0, len(later), num_later)),
    ]


def find_case(name: str) -> Case:
    """Looks up a case by name.

    Raises:
        ConfigError: There is no such case.
    """
    if name not in CASES:
        raise ConfigError(f"case: expected one of {', '.join(CASES)}, got {name!r}.")
    return CASES[name]
