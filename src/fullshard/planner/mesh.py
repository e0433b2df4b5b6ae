"""The mesh: ranks laid out over a replicate axis and a shard axis.

    world 8, replicate 2, shard 4:        shard axis ->
                                      0   1   2   3     replicate axis
                                      4   5   6   7          |  v

Neighbouring ranks share a shard group, so that gathers stay on one host.
"""

from __future__ import annotations

from dataclasses import dataclass

from fullshard.errors import ConfigError
from fullshard.planner.strategy import StrategyRow


@dataclass(frozen=True, slots=True)
class Mesh:
    """Sizes of the two axes; rank = replicate_index * shard + shard_index."""

    replicate: int
    shard: int

    @property
    def world_size(self) -> int:
        return self.replicate * self.shard

    def coordinates(self, rank: int) -> tuple[int, int]:
        """(replicate index, shard index) of a rank."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank: expected 0 to {self.world_size - 1}; got {rank}.")
        return divmod(rank, self.shard)

    def shard_groups(self) -> list[list[int]]:
        """Ranks that gather from each other."""
        return [[r * self.shard + s for s in range(self.shard)] for r in range(self.replicate)]

    def replicate_groups(self) -> list[list[int]]:
        """Ranks that hold the same slice."""
        return [[r * self.shard + s for r in range(self.replicate)] for s in range(self.shard)]


@dataclass(frozen=True, slots=True)
class Topology:
    """Ranks in all, and ranks on one host (None: all on one host)."""

    world_size: int
    local_world_size: int | None = None


def resolve_mesh(
    row: StrategyRow, topology: Topology, replicate: int | None, shard: int | None
) -> Mesh:
    """Choose the mesh's sizes: those asked for, else by strategy and topology.

    Raises:
        ConfigError: The sizes do not multiply to the world size.
    """
    world = topology.world_size
    if not row.shard_params:
        if shard not in (None, 1):
            raise ConfigError(
                f"shard: expected 1 under no_shard, which replicates everything; got {shard}. "
                "Leave it out, or choose a sharded strategy."
            )
        shard = 1
    if replicate is None and shard is None:
        local = topology.local_world_size or world
        shard = local if row.hybrid else world
        _check_divides("local_world_size", shard, world)
    if shard is None:
        assert replicate is not None
        _check_divides("replicate", replicate, world)
        shard = world // replicate
    if replicate is None:
        _check_divides("shard", shard, world)
        replicate = world // shard
    if replicate * shard != world:
        raise ConfigError(
            f"replicate x shard: expected {world} (the number of ranks); got {replicate} x {shard}"
            f" = {replicate * shard}. Leave one of them out and it follows from the other."
        )
    return Mesh(replicate, shard)


def _check_divides(key: str, size: int, world: int) -> None:
    if size < 1 or world % size:
        fitting = [n for n in range(1, world + 1) if world % n == 0]
        nearest = min(fitting, key=lambda n: abs(n - size))
        raise ConfigError(
            f"{key}: expected a divisor of {world} (the number of ranks); got {size}. "
            f"The nearest is {nearest}."
        )
