"""Simulates streams on a CPU, and finds accesses that a GPU may run at the same time.

    with Played().device() as played:   # to the engine, the CPU has streams; process groups
        model = fs.shard(...)           # are simulated
        played.watch(model)
        with played:
            ...                         # train
    played.races                        # accesses that no wait orders

Every operation runs on a stream. The vector clock `clocks[a][b]` is the number of operations of
stream b that are done when a reaches its next operation. A wait takes the maximum of two clocks.
Two accesses to the same bytes, at least one of them a write, are a race unless the clock of the
later one includes the earlier one.

The host is a stream, "host", which accesses host memory and queues the operations of all others.
Reading a value, or copying without `non_blocking`, makes the host wait. Freeing memory counts as a
write by the stream that allocated it.

Clocks also have a time: `took` gives the time of an operation, and `played.time` is the time at
which all queued work is done. It shows how much of a copy or collective compute hides.

Rules of autograd that a CPU does not follow are simulated: a node runs on the stream of its
forward; a parameter's node runs on the stream on which it was bound, and waits for its gradient if
there is one; at the end, the caller of backward waits for the streams of such nodes.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.engine import disk
from fullshard.engine import step as stepping
from fullshard.engine import unit as units
from fullshard.engine.engine import engine_of
from fullshard.transport import c10d, groups, streams
from fullshard.transport.base import Axes

DEFAULT, SIDE, HOST = "default", "side", "host"
TIME = "time"  # of a clock
Clock = dict[str, int]


class Access(NamedTuple):
    """A read or write of the bytes [start, stop) of a storage."""

    start: int
    stop: int
    writes: bool
    stream: str
    tick: int
    what: str


class Ranges:
    """Records NVTX ranges, indented by depth."""

    def __init__(self) -> None:
        self.ranges: list[str] = []
        self.num_open = 0

    def begin_range(self, name: str) -> None:
        self.ranges.append(f"{'  ' * self.num_open}{name}")
        self.num_open += 1

    def end_range(self) -> None:
        self.num_open -= 1


class Played(TorchDispatchMode, Ranges):
    """Simulated streams and process groups of a device, with all accesses to memory."""

    def __init__(self, took: Callable[..., int] = lambda *_: 0) -> None:
        TorchDispatchMode.__init__(self)
        Ranges.__init__(self)
        self.took = took  # (name, tensors, whether it copies to or from the host) -> time
        self.now = DEFAULT
        self.caller = ""  # stream of the caller of backward, if it is not that of the forward
        self.place = ""  # the running event
        self.clocks: defaultdict[str, Clock] = defaultdict(dict)
        self.log: defaultdict[int, list[Access]] = defaultdict(list)
        self.owners: dict[int, str] = {}  # stream that allocated a storage
        self.names: dict[int, str] = {}
        self.hosts: set[int] = set()
        self.kept: defaultdict[int, list[str]] = defaultdict(list)
        self.races: Counter[str] = Counter()
        self.num_accesses = 0
        self.leaves: set[str] = set()

    # ---- the interface of fullshard.transport.streams

    def current(self) -> str:
        return self.now

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    def join(self, waiting: str, stream: str) -> None:
        self.join_clock(waiting, self.clocks[stream])

    def keep(self, tensor: torch.Tensor, stream: str) -> None:
        self.kept[key_of(tensor)].append(stream)

    def make(self, name: str) -> str:
        return name

    def event(self, *, timed: bool = False) -> Clock:
        return dict(self.clocks[self.now])

    def wait(self, event: Clock) -> None:
        self.join_clock(self.now, event)

    def finish(self, event: Clock) -> None:
        self.join_clock(HOST, event)

    def seconds(self, start: Clock, end: Clock) -> float:
        return end.get(TIME, 0) - start.get(TIME, 0)

    # ---- clocks

    def join_clock(self, waiting: str, clock: Clock) -> None:
        known = self.clocks[waiting]
        for stream, tick in clock.items():
            if tick > known.get(stream, 0):
                known[stream] = tick

    def tick(self, stream: str, took: int = 0) -> int:
        self.join(stream, HOST)  # it is queued now
        clock = self.clocks[stream]
        clock[TIME] = clock.get(TIME, 0) + took
        clock[stream] = clock.get(stream, 0) + 1
        return clock[stream]

    def touch(self, key: int, span: tuple[int, int], access: tuple[bool, str, int, str]) -> None:
        """Record an access and its races."""
        new = Access(*span, *access)
        self.num_accesses += 1
        left, clock = [], self.clocks[new.stream]
        for old in self.log[key]:
            overlaps = old.start < new.stop and new.start < old.stop
            knows = clock.get(old.stream, 0) >= old.tick
            if overlaps and (old.writes or new.writes) and not knows:
                self.races[f"{self.names.get(key, 'memory')}: {_told(new)} after {_told(old)}"] += 1
            covered = new.start <= old.start and old.stop <= new.stop
            if not (covered and knows and (new.writes or not old.writes)):
                left.append(old)
        self.log[key] = [*left, new]

    # ---- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
        given |= kwargs or {}
        result = func(*args, **(kwargs or {}))
        returned = [r.alias_info for r in func._schema.returns]
        if any(alias is not None and not alias.is_write for alias in returned):
            return result  # a view
        name = func._schema.name.removeprefix("aten::")
        touched = []
        for argument in func._schema.arguments:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            touched += [(t, writes) for t in _tensors(given.get(argument.name))]
        made = [(t, True) for t, a in zip(_tensors(result), returned, strict=False) if a is None]
        on_host = [key_of(tensor) in self.hosts for tensor, _ in touched]
        queues = name in ("copy_", "_to_copy") and given.get("non_blocking")
        stream = HOST if touched and all(on_host) and not queues else self.now
        took = self.took(name, [t for t, _ in touched], any(on_host) and not all(on_host))
        self.touch_all(touched, stream, name, took)
        if (any(on_host) and not queues) or name == "_local_scalar_dense":
            self.join(HOST, stream)
        self.touch_all(made, self.now, name)
        return result

    @property
    def time(self) -> int:
        """The time at which all queued work is done."""
        return max(clock.get(TIME, 0) for clock in self.clocks.values())

    def touch_all(self, touched: Any, stream: str, name: str, took: int = 0) -> None:
        """Record what an operation reads and writes."""
        tick = self.tick(stream, took)
        for tensor, writes in touched:
            self.own(tensor, stream)
            what = f"{self.place} {name}"
            self.touch(key_of(tensor), _span(tensor), (writes, stream, tick, what))

    def own(self, tensor: torch.Tensor, stream: str) -> None:
        """Assign a new storage to the stream."""
        storage, key = tensor.untyped_storage(), key_of(tensor)
        if key not in self.owners:
            self.owners[key] = stream
            weakref.finalize(storage, self.freed, key)

    def freed(self, key: int) -> None:
        """Record that the allocator may give the memory to its stream's next operation."""
        stream = self.owners.pop(key)
        before = dict(self.clocks[stream])
        for other in self.kept.pop(key, ()):
            self.join(stream, other)
        tick = self.tick(stream)
        self.touch(key, (0, 1 << 60), (True, stream, tick, f"{self.place} free"))
        self.clocks[stream] = before | {stream: tick}  # only the free waited for other streams
        self.log.pop(key)
        self.names.pop(key, None)
        self.hosts.discard(key)

    # ---- the engine

    @contextmanager
    def device(self) -> Iterator[Played]:
        """Context in which models are sharded and trained on the simulated device."""
        patches = [
            patch.object(streams, "of", lambda _: self),
            patch.object(stepping, "has_modes", lambda: False),
            patch.object(stepping, "queue_callback", self._queue_callback),
            patch.object(units, "gradient_hook", self._gradient_hook),
            patch.object(units, "kept_tensors", lambda *_: []),  # frames of the mode keep it alive
            Groups(self).in_place(),
            patch("fullshard.engine.norms.differing_counts", self._read_on_host),
            patch.object(disk.Disk, "load", disk.Disk.read),  # as to a device, at once
            patch.object(disk.Disk, "zeros", self._on_host(disk.Disk.zeros)),
            patch.object(disk.Room, "take", self._on_host(disk.Room.take)),
        ]
        with ExitStack() as stack:
            for each in patches:
                stack.enter_context(each)
            yield self

    @contextmanager
    def backward_from(self, caller: str, forward: str) -> Iterator[None]:
        """Context in which backward is called on another stream than the forward's."""
        self.join(caller, forward)
        self.join(forward, caller)  # the first gradient
        self.caller = caller
        with self.on(forward):
            yield
        self.caller = ""

    def _read_on_host(self, landed: torch.Tensor, *_: Any, **__: Any) -> list[str]:
        access = (False, HOST, self.tick(HOST), "reads what ranks say")
        self.touch(key_of(landed), _span(landed), access)
        return []

    def _on_host(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Returns `make`, whose tensors are marked as host memory."""

        def made(*args: Any) -> torch.Tensor:
            tensor = make(*args)
            self.hosts.add(key := key_of(tensor))
            weakref.finalize(tensor.untyped_storage(), self.hosts.discard, key)
            return tensor

        return made

    def _queue_callback(self, function: Any) -> None:
        def ended() -> None:
            with self.on(self.caller or self.now):
                for leaf in self.leaves:
                    self.join(self.now, leaf)
                function()

        queue(ended)

    def _gradient_hook(self, member: Any) -> Any:
        hook, stream = gradient_hook(member), self.now

        def on_leaf(*args: Any) -> None:
            alive = member_of()
            gradient = alive and torch.Tensor.grad.__get__(alive.compute)
            if gradient is not None:
                self.join(stream, self.now)
                self.keep(gradient, stream)
            self.leaves.add(stream)
            with self.on(stream):
                hook(*args)

        member_of = weakref.ref(member)
        return on_leaf

    def watch(self, model: torch.nn.Module) -> None:
        """Name the engine's buffers and events in reports of races."""
        engine: Any = engine_of(model)
        homes = engine.plan.homes
        named = {
            f"slot {ring}[{at}]": slot
            for ring, slots in engine.rings.buffers.items()
            for at, slot in enumerate(slots)
        }
        for unit in engine.units:
            for at, group in enumerate(unit.groups):
                title = f"{unit.plan.title}/{at}"
                named[f"shard of {title}"] = group.master
                if homes.parameters.value == "host":
                    self.hosts.add(key_of(group.master))
                if group.grads is not None:
                    named[f"sums of {title}"] = group.grads.sums
                    named[f"gradient of {title}"] = group.grads.shown
                    if homes.gradients.value == "host":
                        self.hosts |= {key_of(group.grads.sums), key_of(group.grads.shown)}
        for name, tensor in named.items():
            self.names[key_of(tensor)] = name
            self.own(tensor, engine.runtime.stream)  # on which it was made
        act, actions = engine.runtime.actions.act, engine.runtime.actions

        def acting(event: Any) -> None:
            before, self.place = self.place, f"{event.kind} {event.unit}"
            try:
                act(event)
            finally:
                self.place = before

        actions.act = acting


class Groups:
    """Process groups of equal ranks; the collectives of each group have their own stream.

    Args:
        streams: Streams of a device, real or simulated.
    """

    def __init__(self, streams: Any) -> None:
        self._streams = streams
        self._made: dict[str, Any] = {}

    def functions(self) -> dict[str, Any]:
        """Returns replacements of names in `transport/c10d.py`."""
        return {
            "all_gather_many": self.all_gather_many,
            "all_gather_single": self.all_gather_single,
            "reduce_scatter_many": self.reduce_scatter_many,
            "dist": SimpleNamespace(
                all_reduce=self.all_reduce,
                all_to_all_single=self.all_to_all_single,
                ReduceOp=SimpleNamespace(SUM="sum", MAX="max"),
            ),
        }

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which `fs.shard(..., transport="fake")` uses c10d over these groups."""
        made = patch("fullshard.engine.shard.make_transport", self.make_transport)
        alike = patch("fullshard.engine.norms.differing_counts", lambda *_, **__: [])
        slices = {
            "dist": SimpleNamespace(
                P2POp=lambda *message: message,
                isend=torch.clone,
                irecv=torch.zero_,
                batch_isend_irecv=self.batch_isend_irecv,
            ),
            "own_group": lambda purpose, ranks: (purpose, len(next(iter(ranks)))),
        }
        several = patch.multiple(c10d, **self.functions()), patch.multiple(groups, **slices)
        with made, alike, several[0], several[1]:
            yield

    def make_transport(self, config: Any, mesh: Any) -> c10d.C10dTransport:
        replica, part = mesh.coordinates(0)
        axes = Axes(
            mesh,
            0,
            tuple(mesh.shard_groups()[replica]),
            tuple(mesh.replicate_groups()[part]),
            part,
            replica,
            ("gather", mesh.shard),
            ("reduce", mesh.shard),
            ("replicate", mesh.replicate),
            ("world", mesh.world_size),
        )
        return c10d.C10dTransport(axes, config.reduction)

    @contextmanager
    def carried(self, group: tuple[str, int], works: list[Any], *held: Any) -> Iterator[int]:
        """Context that runs on the group's stream, after all work that the caller queued."""
        name, size = group
        if name not in self._made:
            self._made[name] = self._streams.make(name)
        self._streams.join(self._made[name], self._streams.current())
        with self._streams.on(self._made[name]):
            yield size
            works.append(Work(self._streams, held))

    def all_gather_many(self, fulls: Any, parts: Any, group: Any) -> Any:
        works: list[Any] = []
        with self.carried(group, works, fulls, parts) as size:
            for full, part in zip(fulls, parts, strict=True):
                for place in full.chunk(size):
                    if place.data_ptr() != part.data_ptr():
                        place.copy_(part)
        return works[0]

    def all_gather_single(self, full: Any, part: Any, group: Any, async_op: bool = False) -> Any:
        work = self.all_gather_many([full], [part], group)
        return work if async_op else work.wait()

    def reduce_scatter_many(self, parts: Any, fulls: Any, group: Any) -> list[Any]:
        works: list[Any] = []
        with self.carried(group, works, fulls, parts) as size:
            for full, part in zip(fulls, parts, strict=True):
                part.copy_(full.view(size, -1).sum(0))
        return works

    def all_reduce(
        self, values: Any, op: Any = "sum", group: Any = None, async_op: bool = False
    ) -> Any:
        works: list[Any] = []
        with self.carried(group, works, values) as size:
            values.mul_(size if op == "sum" else 1)
        return works[0] if async_op else works[0].wait()

    def all_to_all_single(self, received: Any, full: Any, group: Any, async_op: bool) -> Any:
        works: list[Any] = []
        with self.carried(group, works, received, full):
            received.copy_(full)
        assert async_op
        return works[0]

    def batch_isend_irecv(self, messages: Any) -> list[Any]:
        works: list[Any] = []
        with self.carried(messages[0][-1], works, messages):
            for call, tensor, *_ in messages:
                call(tensor)
        return works


class HostGroups(Groups):
    """Groups on gloo whose collectives copy a device's tensors through the host.

    They let ranks share a GPU, which NCCL refuses. The host waits for the collective's stream,
    which waits for the caller's, and then copies back on it.
    """

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which `fs.shard(..., transport="c10d")` uses these groups."""
        asked = patch(
            "fullshard.engine.shard.resolve_transport", lambda config, *_: config.transport
        )
        with asked, patch.multiple(c10d, **self.functions()):
            yield

    def _move(self, group: Any, outs: Any, ins: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Write the combined tensors of all ranks."""
        works: list[Any] = []
        with self.carried((group.group_name, dist.get_world_size(group)), works, outs, ins):
            for out, own in zip(outs, ins, strict=True):
                here = own.detach().cpu()
                all_here = [torch.empty_like(here) for _ in range(dist.get_world_size(group))]
                sent = [tensor.view(torch.uint8) for tensor in (*all_here, here)]
                dist.all_gather(sent[:-1], sent[-1], group=group)
                out.copy_(combine(all_here))
        return works[0]

    def all_gather_many(self, fulls: Any, parts: Any, group: Any) -> Any:
        return self._move(group, fulls, parts, torch.cat)

    def reduce_scatter_many(self, parts: Any, fulls: Any, group: Any) -> list[Any]:
        at, size = dist.get_rank(group), dist.get_world_size(group)

        def combine(them: list[Any]) -> Any:
            return torch.stack([full.chunk(size)[at] for full in them]).sum(0)

        return [self._move(group, parts, fulls, combine)] if fulls else []

    def all_reduce(
        self, values: Any, op: Any = "sum", group: Any = None, async_op: bool = False
    ) -> Any:
        combine = torch.sum if op == "sum" else torch.amax
        work = self._move(group, [values], [values], lambda them: combine(torch.stack(them), 0))
        return work if async_op else work.wait()

    def all_to_all_single(self, received: Any, full: Any, group: Any, async_op: bool) -> Any:
        at, size = dist.get_rank(group), dist.get_world_size(group)
        cat = lambda them: torch.cat([other.chunk(size)[at] for other in them])  # noqa: E731
        return self._move(group, [received], [full], cat)


class Work:
    """A collective in flight; it keeps its tensors alive."""

    def __init__(self, streams: Any, held: Any) -> None:
        self._streams, self._done, self._held = streams, streams.event(), held

    def wait(self) -> None:
        """Make the current stream wait for it."""
        self._streams.wait(self._done)
        self._held = None


queue, gradient_hook = stepping.queue_callback, units.gradient_hook


def key_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(value: Any) -> Sequence[torch.Tensor]:
    many = value if isinstance(value, list | tuple) else [value]
    return [t for t in many if isinstance(t, torch.Tensor)]


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    if not tensor.numel():
        return (0, 0)
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return start, start + reach * size


def _told(access: Access) -> str:
    return f"{'write' if access.writes else 'read'} by [{access.what}] on {access.stream}"
