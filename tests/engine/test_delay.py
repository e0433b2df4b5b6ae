"""A simulated wire around a transport changes only arrival times."""

import gc
import time
from itertools import pairwise
from time import perf_counter

import pytest
import torch
import torch.distributed as dist
from benchmarks.delay import DelayTransport, Wire, delayed
from benchmarks.timeline import OnWire, Timeline, slices_of

import fullshard as fs
from fullshard.engine.engine import engine_of
from fullshard.errors import ConfigError
from fullshard.planner.schedule import Event, EventKind
from support.models import chain, mean_square, vectors
from support.ranks import on_ranks

LATENCY_S, BYTES_PER_S = 0.002, 1e8


def trained(transport, delay):
    """Returns a model after three clipped steps, with every loss and norm."""
    model = fs.shard(chain().float(), wrap=["Block"], transport=transport, poison=True)
    if delay:
        delayed(engine_of(model), LATENCY_S, BYTES_PER_S)
    optimizer = torch.optim.AdamW(model.parameters())
    seen = []
    for step in range(3):
        loss = mean_square(model(vectors(step, dist.get_rank())["x"].float()))
        loss.backward()
        seen += [loss.detach(), torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)]
        optimizer.step()
        optimizer.zero_grad()
    return model, [*seen, *(p.to_local().clone() for p in model.parameters())]


@pytest.mark.short(1)
@pytest.mark.parametrize("transport", ["direct", "c10d"])
@on_ranks(2)
def test_a_delayed_run_is_bit_identical(transport):
    (_, plain), (_, late) = trained(transport, delay=False), trained(transport, delay=True)
    assert [
        at for at, (a, b) in enumerate(zip(plain, late, strict=True)) if not torch.equal(a, b)
    ] == []


@on_ranks(2)
def test_the_wait_in_a_release_counts_as_communication():
    """Measures from an unused gather to the end of the wait in its release."""
    model, _ = trained("direct", delay=True)
    actions = engine_of(model).runtime.actions
    unit = engine_of(model).units[1]
    before, began = actions.seconds(), perf_counter()
    unit.start_gather()
    late = perf_counter() - began
    actions.run([Event(EventKind.RELEASE, unit.index)], 0)
    assert actions.seconds() > before
    assert actions.seconds() - before + late >= LATENCY_S


@on_ranks(2)
def test_every_message_passes_the_wire():
    """No other object refers to the inner transport."""
    model, _ = trained("direct", delay=True)
    transport = engine_of(model).transport
    assert isinstance(transport, DelayTransport)
    holders = [holder for holder in gc.get_referrers(transport.inner) if holder is not transport]
    assert [
        type(h).__name__ for h in holders if h is not vars(transport) and h is not locals()
    ] == []


@on_ranks(2)
def test_messages_are_those_of_the_plan_and_queue_in_its_order():
    """Compares the step's events with the messages on both wires."""
    model, _ = trained("direct", delay=True)
    engine = engine_of(model)
    timeline = Timeline(engine.recorder)
    engine.recorder = engine.runtime.actions.recorder = timeline
    transport = engine.transport
    assert isinstance(transport, DelayTransport)
    for wire in (transport.gathers, transport.reductions):
        wire.sent.clear()
    mean_square(model(vectors(3, dist.get_rank())["x"].float())).backward()
    entries, gathers = timeline.entries, transport.gathers.sent
    reductions = transport.reductions.sent
    issued = {kind: [e for e in entries if e.kind == kind] for kind in EventKind}
    assert issued[EventKind.GATHER]
    assert [m.num_bytes for m in gathers] == [e.num_bytes for e in issued[EventKind.GATHER]]
    *summed, settled = reductions
    assert [m.num_bytes for m in summed] == [e.num_bytes for e in issued[EventKind.REDUCE]]
    assert settled.num_bytes > 0
    for sent in (gathers, reductions):
        for message, after in pairwise(sent):
            assert message.done_ns <= after.starts_ns
            assert message.issued_ns <= after.issued_ns
        for message in sent:
            took_s = (message.done_ns - message.starts_ns) / 1e9
            assert took_s == pytest.approx(LATENCY_S + message.num_bytes / BYTES_PER_S)
    wires = [OnWire(m.issued_ns, m.starts_ns, m.done_ns) for m in (*gathers, *reductions)]
    pieces = [p for p in slices_of(entries, wires) if p.lane != "compute"]
    assert len(pieces) == len(wires)  # every message has its event, and one that waits


@on_ranks(2)
def test_a_wait_is_as_long_as_the_wire_and_sleeps():
    """Times one gather and one reduction without compute, and processor time."""
    model = fs.shard(chain().float(), wrap=["Block"], transport="direct")
    engine = engine_of(model)
    delayed(engine, 0.05, float("inf"))
    unit = engine.units[1]
    dist.barrier()
    start, cpu_s = time.perf_counter(), time.process_time()
    unit.start_gather()
    issued_s = time.perf_counter() - start
    unit.wait()
    waited_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_s
    full = torch.ones(unit.groups[0].plan.layout.numel)
    start = time.perf_counter()
    out = torch.empty(full.numel() // 2)
    unit.transport.reduce([full]).sum_into([out])
    assert time.perf_counter() - start >= 0.05
    assert issued_s < waited_s  # issuing a message does not wait
    assert waited_s >= 0.05
    assert cpu_s < waited_s / 2
    assert out.unique().tolist() == [2.0]


def test_an_axis_of_size_one_has_no_wire():
    model = fs.shard(chain(), shard=1, transport="fake")
    engine = engine_of(model)
    transport = delayed(engine, 60.0, 1.0)  # otherwise a step would take minutes
    mean_square(model(**vectors(0, 0))).backward()
    assert not transport.gathers.sent
    assert not transport.reductions.sent


@pytest.mark.parametrize(("latency_s", "bytes_per_s"), [(-1.0, 1.0), (0.0, 0.0)])
def test_an_impossible_wire_is_refused(latency_s, bytes_per_s):
    with pytest.raises(ConfigError, match=r"latency_s >= 0 and bytes_per_s > 0; got"):
        Wire(latency_s, bytes_per_s)
