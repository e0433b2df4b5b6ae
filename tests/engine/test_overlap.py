"""Copies and collectives overlap compute: streams simulated on a CPU, with given times."""

import pytest
import torch
from torch import nn

import fullshard as fs
from fullshard.engine import streamed
from fullshard.engine.engine import engine_of
from support.streams import Played

WIDTH, NUM_BLOCKS, NUM_RANKS = 136, 24, 4
HIDDEN = 0.9
COMPUTE_PER_COPY = 1.1  # time of a block's forward


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + torch.relu(self.up(x))


class Times:
    """Time of operations: a constant for products, bytes for copies between host and device."""

    def __init__(self, *, moves):
        self._moves, self.moved = moves, 0

    def __call__(self, name, tensors, crosses):
        if name in ("mm", "addmm"):
            return int(COMPUTE_PER_COPY * 4 * WIDTH * WIDTH // NUM_RANKS)
        if not crosses:
            return 0
        assert len({t.dtype for t in tensors}) == 1  # CUDA would need unplanned memory for a cast
        self.moved += tensors[0].nbytes
        return tensors[0].nbytes if self._moves else 0


def step_time(*, moves, num_batches, **settings):
    """Returns the time of a step in the steady state, and of its copies."""
    times, start, moved = Times(moves=moves), 0, 0
    with Played(times).device() as played:
        model = fs.shard(
            nn.Sequential(*(Block() for _ in range(NUM_BLOCKS))),
            transport="fake",
            shard=NUM_RANKS,
            wrap=["Block"],
            offload="cpu",
            **settings,
        )
        played.watch(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
        with played:
            for _ in range(3):
                start, moved = played.time, times.moved
                for _ in range(num_batches):
                    model(torch.randn(3, WIDTH)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert not played.races
        assert engine_of(model).runtime.observed.done
    return played.time - start, times.moved - moved


@pytest.mark.short(2)
@pytest.mark.parametrize("settings", [{}, {"param_dtype": "bf16"}], ids=str)
@pytest.mark.parametrize("num_batches", [1, 2])
def test_copies_between_host_and_device_hide_behind_compute(settings, num_batches):
    without, _ = step_time(moves=False, num_batches=num_batches, **settings)
    with_copies, copying = step_time(moves=True, num_batches=num_batches, **settings)
    shard = 4 * WIDTH * WIDTH // NUM_RANKS * NUM_BLOCKS
    times = 3 * num_batches + num_batches - 1  # in, in again, out; and the previous sums
    assert 0.95 * times * shard < copying < 1.05 * times * shard  # the last block stays gathered
    hidden = 1 - (with_copies - without) / copying
    assert hidden >= HIDDEN, f"{hidden:.3f} of {copying} bytes are hidden"


# ---- collectives

MESHES = {
    "gather": ({"shard": 4}, 3 / 4),
    "reduce": ({"shard": 4}, 5 / 4),  # reads everything, writes a part
    "replicate": ({"shard": 2, "replicate": 2, "strategy": "hybrid_shard"}, 1 / 2),
    "replicate, no_shard": ({"replicate": 4, "strategy": "no_shard"}, 1),
}


class OnWire:
    """Time of operations: a constant for products, bytes for collectives of one kind."""

    def __init__(self, kind, compute):
        self._kind, self._compute, self.on_wire = kind, compute, 0
        self.played = Played(self)

    def __call__(self, name, tensors, crosses):
        if name in ("mm", "addmm"):
            return self._compute
        takes = tensors[0].nbytes if tensors and self.played.now == self._kind else 0
        is_settled = self.played.place.startswith("settle")  # a small sum that no compute hides
        self.on_wire += 0 if is_settled else takes
        return 0 if is_settled else takes


def step_on_wire(kind, settings, compute):
    """Returns the time of a step and its collectives, and the engine's measured wait."""
    times = OnWire(kind, compute)
    with times.played.device() as played:
        model = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
        fs.shard(model, transport="fake", wrap=["Block"], **settings)
        played.watch(model)
        engine = engine_of(model)
        with played:
            for _ in range(3):
                found = played.time, times.on_wire, engine.communication_seconds()
                model(torch.randn(3, WIDTH)).sum().backward()
                model.zero_grad()
        assert not played.races
    after = played.time, times.on_wire, engine.communication_seconds()
    return [now - before for now, before in zip(after, found, strict=True)]


@pytest.mark.parametrize("what", MESHES)
def test_collectives_hide_behind_compute_and_waits_for_them_are_measured(what):
    settings, share = MESHES[what]
    compute = int(1.1 * share * 4 * WIDTH * WIDTH)
    without, *_ = step_on_wire("none", settings, compute)
    step, on_wire, waited = step_on_wire(what.partition(",")[0], settings, compute)
    passes = 2 if what == "gather" else 1
    block = share * 4 * WIDTH * WIDTH
    assert on_wire == pytest.approx(passes * NUM_BLOCKS * block, rel=0.1)  # one stays gathered
    assert waited == step - without > 0
    assert 1 - waited / on_wire >= HIDDEN


def test_events_are_not_kept_until_times_are_requested(monkeypatch):
    monkeypatch.setattr(streamed, "MOST_TIMED", 10)
    event, seconds = Played.event, Played.seconds
    made, read, times = [], [], OnWire("gather", 0)
    monkeypatch.setattr(Played, "event", lambda on, timed=0: made.append(timed) or event(on))
    monkeypatch.setattr(Played, "seconds", lambda *given: read.append(given) or seconds(*given))
    with times.played.device() as played:
        model = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
        fs.shard(model, transport="fake", shard=4, wrap=["Block"])
        with played:
            model(torch.randn(3, WIDTH)).sum().backward()
        assert sum(made) - 2 * len(read) <= 2 * 10
        assert engine_of(model).communication_seconds() == played.time > 0
