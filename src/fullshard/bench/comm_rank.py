"""One rank of `fullshard bench comm`: `python -m fullshard.bench.comm_rank FOLDER`.

A transport gets the plan of a model of one parameter, so that buffers lie where the engine would
have them: a home that all ranks map need not fetch what it holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from fullshard.bench.comm import COPY, FETCH, REDUCE, Job
from fullshard.config.schema import ShardConfig
from fullshard.config.supported import check_supported
from fullshard.config.values import DType
from fullshard.engine.placing import Rings
from fullshard.errors import ConfigError, VerifyError
from fullshard.planner.mesh import Mesh, Topology
from fullshard.planner.plan import Plan, make_plan
from fullshard.planner.spec import ModelSpec, ModuleSpec, ParamSpec
from fullshard.transport import Transport, make_transport, resolve_transport

CPU = torch.device("cpu")


def resolve(name: str, world: int) -> ShardConfig:
    """The configuration in which the engine takes this transport here. A collective.

    Raises:
        ConfigError: it cannot, or takes another.
    """
    config = ShardConfig.of(None, transport=name, wrap="none")
    check_supported(config)
    kind = resolve_transport(config, Mesh(1, world), CPU)
    if kind.value != name:
        raise ConfigError(f"transport: expected {name}; the engine takes {kind.value} here.")
    return config


def plan_buffer(num_bytes: int, config: ShardConfig, world: int) -> Plan:
    """The plan of a model of one parameter."""
    parameter = ParamSpec(("weight",), (num_bytes // 4,), DType.FLOAT32, trainable=True)
    spec = ModelSpec("Buffer", (ModuleSpec("", "Buffer"),), (parameter,))
    return make_plan(spec, config, Topology(world))


class Exchange:
    """What one transport does with a flat buffer of weights and one of gradients."""

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
        self.own = self.weights.chunk(world)[transport.rank]

    def fetch(self) -> None:
        """As at the beginning of a forward."""
        self.home.publish()
        if not self.is_shared:
            self.transport.fetch([self.weights]).wait()

    def reduce(self) -> None:
        """As at the end of a unit's backward."""
        self.home.claim(self.gradients)
        self.transport.reduce([self.gradients]).land([self.sums])

    def check(self, world: int) -> None:
        """Bytes that do not arrive have no speed.

        Raises:
            VerifyError: a part is not what its owner wrote, or a sum not that of all ranks.
        """
        self.home.before_write()
        self.own.fill_(self.transport.rank + 1)
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


def measure(num_bytes: int, configs: Sequence[ShardConfig], world: int, num_rounds: int) -> dict:
    """Returns this rank's seconds by round of everything, in turn."""
    source, target = torch.ones(num_bytes // 4), torch.ones(num_bytes // 4)
    turns: dict[str, Callable[[], object]] = {COPY: lambda: target.copy_(source)}
    exchanges = []
    for config in configs:
        transport = make_transport(config, Mesh(1, world))
        exchange = Exchange(transport, plan_buffer(num_bytes, config, world))
        exchange.check(world)
        exchanges.append(exchange)
        turns |= {
            f"{transport.name} {FETCH}": exchange.fetch,
            f"{transport.name} {REDUCE}": exchange.reduce,
        }
    times: dict[str, list[float]] = {key: [] for key in turns}
    keys = list(turns)
    for i in range(num_rounds):
        first = i % len(keys)
        for key in keys[first:] + keys[:first]:
            dist.barrier()
            start = time.perf_counter()
            turns[key]()
            times[key].append(time.perf_counter() - start)
    return times


def measure_all(job: Job) -> dict:
    """Times every size on every transport that can be built here."""
    world = dist.get_world_size()
    configs, absent = [], {}
    for name in job.transports:
        try:
            configs.append(resolve(name, world))
        except ConfigError as error:
            absent[name] = str(error)
    sizes = [measure(size, configs, world, job.num_rounds) for size in job.sizes]
    return {"absent": absent, "sizes": sizes}
