"""Delays a transport by a wire of a given speed, to test overlap on any machine.

A message arrives no earlier than `latency_s + bytes / bytes_per_s` after it was issued. Waiting for
it sleeps, so the processor is free for the compute that should hide it. Gathers, reductions and
sums over replicas use one wire each, as on NCCL with three groups; messages of one wire queue:

    gathers     |-- blocks.1 --|-- blocks.2 --|
    reductions       |-- blocks.7 --|        |-- blocks.6 --|
                --> time

For tests, benchmarks and traces. The inner transport moves the bytes, so results are bit-identical.
On a CPU the host sleeps. On a GPU each wire is a CUDA stream, and a message is a kernel that spins
for the message's time. The kernel occupies one multiprocessor; a collective's kernel occupies more.
Its bytes are moved on the wire's stream after that, and the compute stream waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fullshard.errors import ConfigError
from fullshard.planner.mesh import Mesh
from fullshard.transport.base import Reduction, Transport, Works

if TYPE_CHECKING:
    from fullshard.engine.engine import Engine

NS = 1e9  # a second

# A CUDA kernel that spins for a number of the device's clock cycles: torch has no public one.
spin: Callable[[int], None] = torch.cuda._sleep


def cycles_per_s(device: torch.device, cycles: int = 50_000_000) -> float:
    """Measures the cycles per second of `spin`; drivers do not report the true clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        for _ in range(2):  # the first run wakes the device
            start.record()
            spin(cycles)
            end.record()
        end.synchronize()
    return cycles / (start.elapsed_time(end) / 1e3)


@dataclass(frozen=True, slots=True)
class Message:
    """A message on a wire; times are those of `perf_counter_ns`.

    Attributes:
        starts_ns: End of the messages before it.
        done_ns: Arrival time.
    """

    num_bytes: int
    issued_ns: int
    starts_ns: int
    done_ns: int

    def wait(self) -> None:
        """Sleep until it has arrived."""
        while (left_ns := self.done_ns - time.perf_counter_ns()) > 0:
            time.sleep(left_ns / NS)


@dataclass
class Wire:
    """Carries one message at a time, in the order in which they are sent.

    Attributes:
        sent: Every message so far.
    """

    latency_s: float
    bytes_per_s: float
    sent: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and self.bytes_per_s > 0):
            raise ConfigError(
                f"delay: expected latency_s >= 0 and bytes_per_s > 0; got {self.latency_s} and "
                f"{self.bytes_per_s}. Use float('inf') for bytes that cost nothing."
            )

    def carry(self, num_bytes: int, start: Callable[[], Any]) -> tuple[Any, Any]:
        """Start what moves the bytes of a message; returns its result and the message."""
        return start(), self.send(num_bytes)

    def send(self, num_bytes: int) -> Any:
        """Queue a message behind those in flight."""
        now = time.perf_counter_ns()
        starts = max(now, self.sent[-1].done_ns) if self.sent else now
        took = round(NS * (self.latency_s + num_bytes / self.bytes_per_s))
        self.sent.append(Message(num_bytes, now, starts, starts + took))
        return self.sent[-1]


@dataclass(frozen=True, slots=True)
class QueuedMessage:
    """A message on a wire of a GPU; its times are not known on the host."""

    num_bytes: int
    done: Any

    def wait(self) -> None:
        """Make the current stream wait for it."""
        torch.cuda.current_stream().wait_event(self.done)


@dataclass
class StreamWire(Wire):
    """A wire of a CUDA device: messages queue on a stream of their own.

    Attributes:
        device: Device of the stream.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cuda"))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._stream = torch.cuda.Stream(self.device)
        self._cycles_per_s = cycles_per_s(self.device)

    def carry(self, num_bytes: int, start: Callable[[], Any]) -> tuple[Any, Any]:
        """Queue a message behind those in flight and behind the current stream's work."""
        took_s = self.latency_s + num_bytes / self.bytes_per_s
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            spin(round(took_s * self._cycles_per_s))
            return start(), QueuedMessage(num_bytes, self._stream.record_event())

    def send(self, num_bytes: int) -> Any:
        """Queue a message that moves nothing."""
        return self.carry(num_bytes, lambda: None)[1]


def wire_of(device: torch.device, latency_s: float, bytes_per_s: float) -> Wire:
    """Returns a wire that delays the work of a device."""
    if device.type == "cuda":
        return StreamWire(latency_s, bytes_per_s, device=device)
    return Wire(latency_s, bytes_per_s)


class DelayTransport:
    """Wraps a transport; its messages also take the time of a wire.

    Args:
        inner: Transport that moves the bytes.
        mesh: Mesh of `inner`; an axis of size 1 has no messages.
        wires: The wire of all-gathers; that of reductions over the shard axis, and of small
            vectors; that of sums over the replicate axis.

    Attributes:
        outer_waited_s: How long sums over the replicate axis were waited for; on a CPU.
    """

    def __init__(self, inner: Transport, mesh: Mesh, wires: tuple[Wire, Wire, Wire]) -> None:
        self.inner = inner
        self.gathers, self.reductions, self.outer = wires
        self.outer_waited_s = 0.0
        self.name, self.rank, self.scratch = inner.name, inner.rank, inner.scratch
        self.axes, self.home, self.phase, self._mesh = inner.axes, inner.home, inner.phase, mesh

    def claim(self, slot: torch.Tensor) -> None:
        self.inner.claim(slot)

    def fetch(self, fulls: Sequence[torch.Tensor], unit: str = "") -> Works:
        if self._mesh.shard == 1:
            return self.inner.fetch(fulls, unit)
        num_bytes = self._others_bytes(fulls)
        return _Late(*self.gathers.carry(num_bytes, lambda: self.inner.fetch(fulls, unit)))

    def reduce(self, fulls: Sequence[torch.Tensor]) -> Reduction:
        if self._mesh.shard == 1:
            return self.inner.reduce(fulls)
        num_bytes = self._others_bytes(fulls)
        return _Late(*self.reductions.carry(num_bytes, lambda: self.inner.reduce(fulls)))

    def sum_replicas(self, values: torch.Tensor) -> Iterator[None]:
        steps = self.inner.sum_replicas(values)
        next(steps, None)
        message = self.outer.send(_around(values, self._mesh.replicate))
        yield
        start = time.perf_counter()
        message.wait()
        self.outer_waited_s += time.perf_counter() - start
        yield from steps

    def all_reduce(self, values: torch.Tensor, *, maximum: bool = False) -> None:
        if self._mesh.world_size > 1:
            self.reductions.send(_around(values, self._mesh.world_size)).wait()
        self.inner.all_reduce(values, maximum=maximum)

    def _others_bytes(self, fulls: Sequence[torch.Tensor]) -> int:
        """Returns the bytes of all parts but one: what this rank receives."""
        shard = self._mesh.shard
        return sum(full.nbytes for full in fulls) * (shard - 1) // shard


def _around(values: torch.Tensor, num_ranks: int) -> int:
    """Bytes of an all-reduce: each part is reduced once and broadcast once."""
    return 2 * values.nbytes * (num_ranks - 1) // num_ranks


class _Late:
    """A collective in flight that ends no earlier than its message."""

    __slots__ = ("_message", "_under_way")

    def __init__(self, under_way: Any, message: Any) -> None:
        self._under_way, self._message = under_way, message

    def wait(self) -> None:
        self._message.wait()
        self._under_way.wait()

    def sum_into(self, outs: Sequence[torch.Tensor]) -> None:
        self._message.wait()
        self._under_way.sum_into(outs)


def delayed(engine: Engine, latency_s: float, bytes_per_s: float) -> DelayTransport:
    """Put wires around an engine's transports, in place, while no message is in flight.

    Args:
        engine: Engine of a sharded model, before its first step or between two.
        latency_s: Latency per message, s.
        bytes_per_s: Bandwidth of each of the three wires.

    Returns:
        The transport of the whole mesh; all of the engine's share its wires.

    Raises:
        ConfigError: There is no such wire.
    """
    one, two, three = (wire_of(engine.device, latency_s, bytes_per_s) for _ in range(3))
    late = {
        id(inner): DelayTransport(inner, mesh, (one, two, three))
        for mesh, inner in engine.transports.items()
    }
    for unit in engine.units:
        unit.transport = late[id(unit.transport)]
    engine.transports.update({m: late[id(inner)] for m, inner in engine.transports.items()})
    whole = late[id(engine.transport)]
    engine.transport = engine.gradients.transport = engine.norms.transport = whole
    return whole
