"""`fullshard bench comm`: the time of each transport for a flat buffer, and of a memory copy.

A transport gets the plan of a model of one parameter, so that buffers are placed as the engine
places them: a shared home has nothing to fetch.

Method:

The buffers are those of a plan of a model with one float32 parameter. fetch: until all parts of the
weights have arrived (all-gather; in a shared home ranks only wait for each other). reduce: until a
rank has its part of the sum of all gradients (reduce-scatter). copy: torch.copy_ of as many bytes
by every rank at once. GB/s is the buffer's size by the time.

Each has one turn per round, in an order that rotates with every round. A turn begins at a barrier
and lasts until the slowest rank has its result. Times are medians, ratios medians over the rounds
of two times of one round, with a 95 % bootstrap interval. One thread per rank.

Results are checked before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from fullshard.bench.measurement import (
    Neighbours,
    Page,
    Say,
    method_of,
    paired_ratio,
    run_ranks,
    slowest,
    timed,
)
from fullshard.config.host_memory import available_bytes
from fullshard.config.schema import ShardConfig
from fullshard.config.supported import check_supported
from fullshard.config.values import DType
from fullshard.engine.placing import Rings
from fullshard.errors import ConfigError, VerifyError, WillNotFitError
from fullshard.planner.mesh import Mesh, Topology
from fullshard.planner.plan import Plan, make_plan
from fullshard.planner.spec import ModelSpec, ModuleSpec, ParamSpec
from fullshard.transport.base import Transport
from fullshard.transport.groups import make_transport, resolve_transport

MIB = 2**20
CPU = torch.device("cpu")
TRANSPORTS = ("c10d", "direct", "shared")  # those that move bytes between processes
COPY, FETCH, REDUCE = "copy", "fetch", "reduce"
DEFAULT_MIB, DEFAULT_RANKS = (1, 16, 64), (2, 4)
BUFFERS = 12  # at most, per rank: two to copy, and the slots and receive buffers of a transport
COLUMNS = ("ranks", "MiB", "what", "by", "ms", "GB/s", "to a copy [95 %]")
METHOD = method_of(__doc__)


@dataclass(frozen=True)
class CommJob:
    """The job of one group of ranks.

    Attributes:
        sizes: Bytes of the flat buffers.
    """

    transports: tuple[str, ...]
    sizes: tuple[int, ...]
    num_rounds: int


def check(job: CommJob, worlds: Sequence[int]) -> None:
    """Refuses what cannot be measured here, before a rank starts.

    Raises:
        ConfigError: There is no such transport.
        WillNotFitError: The buffers of all ranks are larger than the free memory.
    """
    unknown = [name for name in job.transports if name not in TRANSPORTS]
    if unknown:
        raise ConfigError(
            f"transport: expected one of {', '.join(TRANSPORTS)}, got {unknown[0]!r}."
        )
    needed, free = BUFFERS * max(job.sizes) * max(worlds), available_bytes()
    if needed > free:
        raise WillNotFitError(
            f"mib: expected at most {free // (BUFFERS * max(worlds) * MIB)} for {max(worlds)} "
            f"ranks in free memory, got {max(job.sizes) // MIB}. Lower --mib or --ranks."
        )


# ---- on a rank -----------------------------------------------------------------------------------


def resolve(name: str, world: int) -> ShardConfig:
    """Return the configuration in which the engine uses this transport here. A collective.

    Raises:
        ConfigError: The engine cannot use it, or uses another.
    """
    config = ShardConfig.of(None, transport=name, wrap="none")
    check_supported(config)
    kind = resolve_transport(config, [Mesh(1, world)], CPU)
    if kind.value != name:
        raise ConfigError(f"transport: expected {name}; the engine takes {kind.value} here.")
    return config


def plan_buffer(num_bytes: int, config: ShardConfig, world: int) -> Plan:
    """Returns the plan of a model of one parameter."""
    parameter = ParamSpec(("weight",), (num_bytes // 4,), DType.FLOAT32, trainable=True)
    spec = ModelSpec("Buffer", (ModuleSpec("", "Buffer"),), (parameter,))
    return make_plan(spec, config, Topology(world))


class TimedExchange:
    """The messages of one transport for a flat buffer of weights and one of gradients."""

    def __init__(self, transport: Transport, plan: Plan) -> None:
        self.transport, self.home = transport, transport.home
        self.home.open_weights(plan.units)
        group, world = plan.units[0].groups[0], plan.mesh.shard
        rings = Rings(plan.rings, self.home.open_slots(plan.units, plan.rings), CPU, poison=False)
        numel, weights = group.layout.numel, self.home.weights(0, 0)
        self.is_shared = weights is not None
        if weights is not None:
            self.weights = weights.full
        else:
            assert group.slot is not None
            self.weights = rings.view(group.slot, numel)
        assert group.grad_slot is not None
        self.gradients = rings.view(group.grad_slot, numel)
        self.sums = torch.zeros(numel // world)

    def fetch(self) -> None:
        """As at the beginning of a forward."""
        self.home.publish()
        if not self.is_shared:
            self.transport.fetch([self.weights]).wait()

    def reduce(self) -> None:
        """As at the end of a unit's backward."""
        self.home.claim(self.gradients)
        self.transport.reduce([self.gradients]).sum_into([self.sums])

    def check(self, world: int) -> None:
        """Checks that the bytes arrive.

        Raises:
            VerifyError: A part differs from its owner's, or a sum does not include all ranks.
        """
        self.home.before_write()
        self.weights.chunk(world)[self.transport.rank].fill_(self.transport.rank + 1)
        self.fetch()
        self.gradients.fill_(self.transport.rank + 1)
        self.reduce()
        parts = [float(part.sum()) / part.numel() for part in self.weights.double().chunk(world)]
        found, total = float(self.sums.double().mean()), sum(range(1, world + 1))
        if parts != list(range(1, world + 1)) or found != total:
            raise VerifyError(
                f"{self.transport.name}: expected parts 1 to {world} and their sum {total}, got "
                f"{parts} and {found}."
            )


def measure_size(
    num_bytes: int, configs: Sequence[ShardConfig], world: int, num_rounds: int
) -> dict[str, list[float]]:
    """Returns this rank's seconds by "transport operation" and round."""
    source, target = torch.ones(num_bytes // 4), torch.ones(num_bytes // 4)
    turns: dict[str, Callable[[], object]] = {COPY: lambda: target.copy_(source)}
    for config in configs:
        transport = make_transport(config, Mesh(1, world))
        exchange = TimedExchange(transport, plan_buffer(num_bytes, config, world))
        exchange.check(world)
        turns |= {
            f"{transport.name} {FETCH}": exchange.fetch,
            f"{transport.name} {REDUCE}": exchange.reduce,
        }
    times: dict[str, list[float]] = {key: [] for key in turns}
    keys = list(turns)
    for i in range(num_rounds):
        first = i % len(keys)
        for key in keys[first:] + keys[:first]:
            times[key].append(timed(turns[key])[0])
    return times


def measure(job: CommJob) -> dict[str, Any]:
    """Times every size on every transport that can be built here."""
    world = dist.get_world_size()
    configs, absent = [], {}
    for name in job.transports:
        try:
            configs.append(resolve(name, world))
        except ConfigError as error:
            absent[name] = str(error)
    sizes = [measure_size(size, configs, world, job.num_rounds) for size in job.sizes]
    return {"absent": absent, "sizes": sizes}


# ---- the command ---------------------------------------------------------------------------------


def run(
    job: CommJob, worlds: Sequence[int], *, command: str, timeout_s: float, wait: bool, say: Say
) -> Page:
    """Measures every number of ranks.

    Raises:
        FullshardError: A rank failed; its own error has been shown.
    """
    rows: list[dict[str, Any]] = []
    absent: dict[str, str] = {}
    with Neighbours(wait=wait, say=say) as neighbours:
        for world in worlds:
            say(f"{world} ranks: {job.num_rounds} rounds of {', '.join(job.transports)}")
            what = f"bench comm: {world} ranks"
            found = run_ranks(f"{__name__}:measure", job, world, what=what, timeout_s=timeout_s)
            absent |= found[0]["absent"]
            for at, size in enumerate(job.sizes):
                rows += _rows(world, size, [rank["sizes"][at] for rank in found])
    return Page(
        "comm",
        "Transports beside a memory copy",
        command,
        rows,
        COLUMNS,
        [_cells(row) for row in rows],
        METHOD,
        neighbours,
        absent,
    )


def _rows(
    world: int, size: int, ranks: Sequence[dict[str, list[float]]]
) -> list[dict[str, object]]:
    """One row for everything that was timed at one size."""
    times = slowest(ranks)
    return [
        {
            "name": key.split()[0],
            "operation": key.split()[-1],
            "num_ranks": world,
            "num_bytes": size,
            "time_s": median(seconds),
            "bytes_per_s": size / median(seconds),
            "ratio_to_copy": paired_ratio(seconds, times[COPY]).to_dict(),
            "num_rounds": len(seconds),
        }
        for key, seconds in times.items()
    ]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(row["num_ranks"]),
        f"{row['num_bytes'] / MIB:g}",
        row["operation"],
        row["name"],
        f"{row['time_s'] * 1e3:.2f}",
        f"{row['bytes_per_s'] / 1e9:.2f}",
        "{value:.2f} [{low:.2f}, {high:.2f}]".format(**row["ratio_to_copy"]),
    )
