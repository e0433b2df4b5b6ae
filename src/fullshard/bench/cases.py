"""What a benchmark measures: the model shapes and the engines, as data that imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from fullshard.errors import ConfigError


@dataclass(frozen=True)
class Case:
    """One model on one number of ranks.

    Attributes:
        batch: sequences a rank and step.
        seq: tokens a sequence.
    """

    name: str
    width: int
    layers: int
    vocab: int
    batch: int
    seq: int
    num_ranks: int

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all ranks in one step."""
        return self.num_ranks * self.batch * self.seq

    @property
    def numel(self) -> int:
        """Parameters of the model."""
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + 2 * self.vocab * self.width + 2 * self.width

    def describe(self) -> str:
        """Says the shape in one line."""
        return (
            f"{self.name}: GPT of width {self.width} and {self.layers} blocks, {self.num_ranks} "
            f"ranks, {self.batch} x {self.seq} tokens a rank, float32"
        )


CASES = {
    case.name: case
    for case in (
        Case("tiny", width=64, layers=2, vocab=128, batch=2, seq=16, num_ranks=2),
        Case("29M", width=512, layers=8, vocab=4096, batch=2, seq=256, num_ranks=2),
        Case("109M", width=1024, layers=8, vocab=4096, batch=1, seq=128, num_ranks=2),
        Case("29M-4", width=512, layers=8, vocab=4096, batch=1, seq=128, num_ranks=4),
    )
}
DEFAULT_CASES = ("29M", "109M")

OURS, REFERENCE, FLOOR = "fullshard", "fsdp2", "floor"
CORE = (OURS, REFERENCE, FLOOR)
BYTES_PER_PARAMETER = 20  # a rank's, where nothing is sharded: AdamW's 16, and activations


@dataclass(frozen=True)
class Peer:
    """One engine that takes part: a row of every table.

    Attributes:
        package: the import name that has to be installed.
        trains: False for the floor, whose losses say nothing.
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
        Peer("fsdp2", "full_shard", "torch", "fully_shard a block, reshard_after_forward=True"),
        Peer("fsdp2-zero2", "shard_grad_op", "torch", "the same, reshard_after_forward=False"),
        Peer("fsdp1", "full_shard", "torch", "FullyShardedDataParallel, use_orig_params=True"),
        Peer("ddp", "no_shard", "torch", "DistributedDataParallel, gradient_as_bucket_view=True"),
        Peer("deepspeed", "full_shard", "deepspeed", "DeepSpeed ZeRO stage 3"),
        Peer("floor", "none", "torch", "no communication, 1/W of the optimizer", trains=False),
    )
}


def installed_peers(names: tuple[str, ...]) -> tuple[list[Peer], list[str]]:
    """Splits engine names into the peers that can run here and the names that are absent."""
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise ConfigError(
            f"engine: expected one of {', '.join(PEERS)}, got {unknown[0]!r}. Name one of those."
        )
    wanted = [PEERS[name] for name in dict.fromkeys(names)]
    present = [peer for peer in wanted if find_spec(peer.package) is not None]
    return present, [peer.name for peer in wanted if peer not in present]


def groups_of(peers: Sequence[Peer], case: Case, budget_bytes: int) -> list[tuple[Peer, ...]]:
    """Splits engines into groups that are alive at the same time without filling the memory.

        all fit    [fullshard, fsdp2, floor, ddp, fsdp1]
        three fit  [fullshard, fsdp2, floor]  [fsdp2, ddp, fsdp1]

    Ours, FSDP2 and the floor share the first group; FSDP2, the pair of every ratio, is in all.
    """
    engine_bytes = BYTES_PER_PARAMETER * case.numel * case.num_ranks
    size = max(len(CORE), budget_bytes // engine_bytes)
    if len(peers) <= size:
        return [tuple(peers)]
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
        ConfigError: there is no such case.
    """
    if name not in CASES:
        raise ConfigError(f"case: expected one of {', '.join(CASES)}, got {name!r}. Name one.")
    return CASES[name]
