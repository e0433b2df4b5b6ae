"""Strategies, and the mesh: ranks laid out over a replicate axis and a shard axis.

Strategies are data: a new one adds a row, never a branch.

    strategy              shard_params  reshard_after_forward  mesh (replicate, shard)
    full_shard            yes           yes                    (1, W)          ZeRO-3
    shard_grad_op         yes           no                     (1, W)          ZeRO-2
    no_shard              no            no                     (W, 1)          DDP
    hybrid_shard          yes           yes                    (hosts, local)  HSDP
    hybrid_shard_zero2    yes           no                     (hosts, local)

Reduction follows from the mesh: reduce-scatter on the shard axis if it is larger than 1, all-reduce
on the replicate axis if it is larger than 1.

    world 8, replicate 2, shard 4:        shard axis ->
                                      0   1   2   3     replicate axis
                                      4   5   6   7          |  v

Neighbouring ranks form a shard group, so that gathers stay on one host. A DeviceMesh may number
its ranks in another order, stored in `Mesh.order`: [[0, 2], [1, 3]] is order (0, 2, 1, 3).

Other axes, such as tensor parallelism, may have sharded the parameters before. Their ranks are
neighbours:

    world 8, shard 4, inner 2:            shard axis ->
                                     0 1  2 3  4 5  6 7   shard groups 0 2 4 6 and 1 3 5 7
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from fullshard.config.sharding import ShardConfig
from fullshard.config.values import Strategy
from fullshard.errors import ConfigError

MOST_RANKS = 1 << 20


@dataclass(frozen=True, slots=True)
class StrategyRow:
    """The meaning of a strategy.

    Attributes:
        shard_params: Between steps each rank of the shard axis stores only its part.
        reshard_after_forward: Gathered units release their slots after forward.
        hybrid: Without given sizes, shard within a host and replicate over hosts.
    """

    shard_params: bool
    reshard_after_forward: bool
    hybrid: bool = False


ROWS = {
    Strategy.FULL_SHARD: StrategyRow(shard_params=True, reshard_after_forward=True),
    Strategy.SHARD_GRAD_OP: StrategyRow(shard_params=True, reshard_after_forward=False),
    Strategy.NO_SHARD: StrategyRow(shard_params=False, reshard_after_forward=False),
    Strategy.HYBRID_SHARD: StrategyRow(shard_params=True, reshard_after_forward=True, hybrid=True),
    Strategy.HYBRID_SHARD_ZERO2: StrategyRow(
        shard_params=True, reshard_after_forward=False, hybrid=True
    ),
}


def row_of(strategy: Strategy) -> StrategyRow:
    """Returns the row of a strategy.

    Raises:
        ConfigError: The strategy is `auto`, which the search has to resolve first.
    """
    if strategy not in ROWS:
        raise ConfigError(
            f"strategy: expected one of {', '.join(ROWS)}; got '{strategy}', which needs a batch "
            "to decide. Set one of them."
        )
    return ROWS[strategy]


@dataclass(frozen=True, slots=True)
class Mesh:
    """Sizes of the two axes, and the position of every rank.

    Attributes:
        replicate, shard: Sizes of the axes.
        order: The rank at each position, where position = (replicate_index * shard + shard_index) *
            inner + inner_index. Empty: a rank's position is its number.
        inner: Number of ranks along all other axes, which shard parameters first.
    """

    replicate: int
    shard: int
    order: tuple[int, ...] = field(default=(), metadata={"omitted": ()})
    inner: int = field(default=1, metadata={"omitted": 1})

    @property
    def world_size(self) -> int:
        return self.num_copies * self.inner

    @property
    def num_copies(self) -> int:
        """Number of ranks with different batches: those of both axes."""
        return self.replicate * self.shard

    def unsharded(self) -> Mesh:
        """Returns the mesh of the same ranks without sharding."""
        return Mesh(self.num_copies, 1, self.order, self.inner)

    def of_experts(self, groups: Collection[tuple[int, ...]]) -> Mesh:
        """Return the mesh of parameters of which the ranks of each group have different parts.

        The ranks of a group see batches of their own and exchange tokens:

            dense      shard 4              0 1 2 3
            experts    shard 2 x group 2    (0 1) (2 3)     shard groups 0 2 and 1 3

        Args:
            groups: The ranks of each group, in the order of their parts.

        Raises:
            ConfigError: The groups do not divide the ranks, or cut through other axes.
        """
        size, block = len(next(iter(groups))), self.shard * self.inner
        groups = sorted(groups, key=lambda group: self.place(group[0]))
        ranks = [rank for group in groups for rank in group]
        blocks = [{self.place(rank) // self.inner for rank in group} for group in groups]
        is_whole = all(len(found) * self.inner == size for found in blocks)
        once = sorted(ranks) == list(range(self.world_size)) and {*map(len, groups)} == {size}
        if not (once and is_whole) or (block % size and size % block):
            raise ConfigError(
                f"expert axis: expected groups of equal size that contain each of "
                f"{self.world_size} ranks once and whole groups of other axes ({self.inner} "
                f"ranks), and whose size divides {block}, the ranks that share a copy of the dense "
                f"parameters, or is a multiple; got {groups}. Make it an axis of the same mesh: "
                "init_device_mesh(device, (shard, expert), mesh_dim_names=('shard', 'expert')), "
                "and call fs.shard(model, mesh=mesh['shard', 'expert'])."
            )
        return replace(self.spread(size), order=order_of(ranks))

    def spread(self, size: int) -> Mesh:
        """Return the mesh of parameters of which `size` ranks in a row have different parts."""
        if size <= self.inner:
            return self
        shard = max(1, self.shard * self.inner // size)
        return Mesh(self.world_size // size // shard, shard, self.order, size)

    def axes(self, most_parts: int) -> dict[str, int]:
        """Returns names and sizes of all axes, the outermost first.

        Args:
            most_parts: Number of ranks in a row with different experts; `inner` if there are none.
        """
        expert, sizes = most_parts // self.inner, {"replicate": self.replicate, "shard": self.shard}
        # Dense parameters are sharded over the expert axis too, or replicated over it.
        sizes["replicate" if self.shard % expert else "shard"] //= expert
        return {**sizes, "expert": expert, "tensor": self.inner}

    def place(self, rank: int) -> int:
        """Returns the position of a rank; see `order`."""
        return self.order.index(rank) if self.order else rank

    def coordinates(self, rank: int) -> tuple[int, int]:
        """Returns (replicate index, shard index) of a rank."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank: expected 0 to {self.world_size - 1}; got {rank}.")
        return divmod(self.place(rank) // self.inner, self.shard)

    def shard_groups(self) -> list[list[int]]:
        """Returns the groups of ranks that gather from each other."""
        ranks, size = self.order or range(self.world_size), self.shard * self.inner
        blocks = [ranks[first : first + size] for first in range(0, len(ranks), size)]
        return [list(block[i :: self.inner]) for block in blocks for i in range(self.inner)]

    def replicate_groups(self) -> list[list[int]]:
        """Return the groups of ranks with the same slice."""
        ranks, step = self.order or range(self.world_size), self.shard * self.inner
        return [list(ranks[first::step]) for first in range(step)]


@dataclass(frozen=True, slots=True)
class Topology:
    """The ranks of a run.

    Attributes:
        world_size: Number of ranks.
        local_world_size: Number of ranks per host; None: all ranks are on one host.
        order: See `Mesh.order`.
        inner: See `Mesh.inner`.

    Raises:
        ConfigError: There are more than MOST_RANKS; planning time and memory grow with the ranks.
    """

    world_size: int
    local_world_size: int | None = None
    order: tuple[int, ...] = ()
    inner: int = 1

    def __post_init__(self) -> None:
        if self.world_size > MOST_RANKS:
            raise ConfigError(
                f"world size: expected at most {MOST_RANKS:,} ranks, got {self.world_size:,}. "
                "Lower launch.num_processes, or --gpus or --nodes."
            )

    @property
    def ranks_per_host(self) -> int:
        return self.local_world_size or self.world_size

    @property
    def num_hosts(self) -> int:
        return -(-self.world_size // self.ranks_per_host)


def order_of(ranks: Sequence[int]) -> tuple[int, ...]:
    """Returns `Mesh.order` for the ranks of a device mesh, row by row.

    Raises:
        ConfigError: The mesh does not have all ranks from 0, each once.
    """
    if sorted(ranks) != list(range(len(ranks))):
        raise ConfigError(
            f"mesh: expected a mesh of all ranks, 0 to {len(ranks) - 1}, each once; got "
            f"{list(ranks)}. A part of the ranks is not yet supported."
        )
    return () if list(ranks) == sorted(ranks) else tuple(ranks)


def mesh_of(config: ShardConfig, topology: Topology) -> Mesh:
    """Return the mesh of a configuration. Only this function decides where a rank is.

    Ranks are numbered along (replicate, shard, context, expert, tensor), the last axis first:
    tensor ranks are neighbours on a host. Dense parameters are sharded over the shard, context and
    expert axes together, or replicated over them under no_shard.

    Raises:
        ConfigError: The sizes do not multiply to the world size, or a tensor group spans hosts.
    """
    row, expert, tensor = row_of(config.strategy), config.expert, config.tensor
    if config.context > 1:
        groups = topology.world_size // topology.inner // (expert * tensor)
        check_divides("context", config.context, groups, "ranks / expert / tensor")
        config = config.without("context")
    if tensor * expert == 1:
        return resolve_mesh(row, topology, config.replicate, config.shard)
    world, local = topology.world_size, topology.ranks_per_host
    check_divides("tensor", tensor, local, "the ranks of a host")
    check_divides("expert", expert, world // tensor, f"{world} ranks / tensor {tensor}")
    others = expert * tensor
    rest = replace(topology, world_size=world // others, local_world_size=max(1, local // others))
    beside = "".join(
        f" / {axis} {size}" for axis, size in (("expert", expert), ("tensor", tensor)) if size > 1
    )
    sizes = resolve_mesh(row, rest, config.replicate, config.shard, f"{world} ranks{beside}")
    shard, replicate = (expert, 1) if row.shard_params else (1, expert)
    return Mesh(sizes.replicate * replicate, sizes.shard * shard, topology.order, tensor)


def groups_of_experts(config: ShardConfig, mesh: Mesh) -> list[tuple[int, ...]]:
    """Return the groups of ranks with different experts, in the order of `mesh_of`."""
    size = config.expert * config.tensor
    return [tuple(range(at, at + size)) for at in range(0, mesh.world_size, size)]


def resolve_mesh(
    row: StrategyRow,
    topology: Topology,
    replicate: int | None,
    shard: int | None,
    what: str = "the number of ranks",
) -> Mesh:
    """Returns the mesh with the configured sizes, or with sizes from strategy and topology.

    Args:
        row: Row of the strategy.
        topology: Ranks of the run.
        replicate: Configured size of the axis; None: it follows.
        shard: Configured size of the axis; None: it follows.
        what: The number that the sizes multiply to, in words.

    Raises:
        ConfigError: The sizes do not multiply to the world size.
    """
    world = topology.world_size // topology.inner
    if not row.shard_params:
        if shard not in (None, 1):
            raise ConfigError(
                f"shard: expected 1 under no_shard, which replicates everything; got {shard}. "
                "Leave it out, or choose a sharded strategy."
            )
        shard = 1
    if replicate is None and shard is None:
        shard = topology.ranks_per_host if row.hybrid else world
        check_divides("local_world_size", shard, world, what)
    if shard is None:
        assert replicate is not None
        check_divides("replicate", replicate, world, what)
        shard = world // replicate
    if replicate is None:
        check_divides("shard", shard, world, what)
        replicate = world // shard
    if replicate * shard != world:
        raise ConfigError(
            f"replicate x shard: expected {world} ({what}); got {replicate} x {shard} = "
            f"{replicate * shard}. Leave one of them out; it follows from the other."
        )
    return Mesh(replicate, shard, topology.order, topology.inner)


def check_divides(key: str, size: int, world: int, what: str) -> None:
    """Raises ConfigError, with the nearest divisor, if a size does not divide a number."""
    if size < 1 or world % size:
        fitting = [n for n in range(1, world + 1) if world % n == 0]
        nearest = min(fitting, key=lambda n: abs(n - size))
        raise ConfigError(
            f"{key}: expected a divisor of {world} ({what}); got {size}. The nearest is {nearest}."
        )
