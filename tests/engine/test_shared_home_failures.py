"""Failures of ranks that map one copy of the weights: memory, a peer, the sandbox."""

import errno
import faulthandler
import gc
import os
import signal
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fullshard as fs
from fullshard.config import host_memory
from fullshard.errors import OutOfMemoryError
from fullshard.transport import segment
from fullshard.transport.segment import Mark
from support import forked as subprocess
from support.models import Chain, perturbed, vectors
from support.parity import whole_params
from support.ranks import on_ranks
from support.scripts import error_of


def chain(transport="shared"):
    return fs.shard(perturbed(Chain(3).double()), transport=transport, poison=True)


AVAILABLE = host_memory.available_bytes


@on_ranks(2)
def test_lack_of_host_memory_is_an_error_on_all_ranks_at_once():
    """The first rank reports the lack of memory to all ranks, and no rank hangs."""
    if dist.get_rank() == 0:
        host_memory.available_bytes = lambda: 0
    try:
        with pytest.raises(OutOfMemoryError, match=r"rank 0 of them got: .*Cannot allocate memory"):
            chain()
    finally:
        host_memory.available_bytes = AVAILABLE
    assert whole_params(chain())["head.bias"].shape == (3,)


DIES = Path(__file__).parents[1] / "support" / "shared_home_job.py"
POINTS = [mark.name for mark in Mark]


@pytest.mark.short(2)
@pytest.mark.parametrize("mark", POINTS)
@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.slow)])
def test_a_rank_killed_at_a_barrier_is_named_and_leaves_no_segment(tmp_path, mark, when):
    """Rank 1 kills itself just before or after it announces its progress."""
    jobs = [
        subprocess.Popen(
            [sys.executable, str(DIES), str(tmp_path / "store"), str(rank), mark, when],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        start = time.monotonic()
        _, survivor = jobs[0].communicate(timeout=60)
        jobs[1].wait(timeout=20)
    finally:
        for job in jobs:
            job.kill()
            job.stderr.close()
    assert jobs[1].returncode == -signal.SIGKILL
    named = f"expected rank 1 (process {jobs[1].pid}) to take part; it has ended"
    by_message = "expected every rank to take part; one has ended or closed its connection"
    assert named in survivor or (mark in ("PLACED", "FETCHED") and by_message in survivor)
    assert jobs[0].returncode == 1
    assert time.monotonic() - start < 30
    assert not segments()


def segments():
    """Returns segments mapped by this process, and leftover files."""
    held = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            ours = DIES.name in (process / "cmdline").read_text()
            links = [str(link.readlink()) for link in (process / "fd").iterdir()] if ours else []
        except OSError:
            continue
        held |= {link for link in links if "memfd:fullshard" in link}
    return held | set(Path("/dev/shm").glob("fullshard*"))


@on_ranks(2)
def test_descriptors_and_addresses_go_away_with_the_model():
    def held():
        gc.collect()
        gc.collect()  # objects of the first that C++ made unreachable
        maps = Path("/proc/self/maps").read_text()
        descriptors = 0
        for link in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # closed by a thread of the pool
                descriptors += "memfd:fullshard" in str(link.readlink())
        return maps.count("memfd:fullshard"), descriptors

    before = held()
    model = chain()
    model(vectors(0, 0)["x"]).square().mean().backward()
    assert held()[0] > before[0]
    del model
    assert held() == before


def losses_of(transport, before_steps):
    """Returns the losses of three steps, and the result of `before_steps`."""
    torch.manual_seed(0)
    model, losses = chain(transport), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = before_steps(model)
    for step in range(3):
        loss = model(vectors(step, dist.get_rank())["x"]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, found


@pytest.mark.parametrize("transport", ["shared", "direct", "c10d"])
@on_ranks(2)
def test_forked_children_do_no_harm(transport):
    """A forked child, like a data loader's worker, outlives the steps.

    In the child, calls that announce writes or send messages raise errors, as do reads of shards in
    shared memory, which is not accessible. Private memory of this rank was copied. The child may
    use a model that it shards itself.
    """
    told, end = os.pipe()
    is_shared = transport == "shared"
    children = []

    def use(model, aliases):
        if os.fork() == 0:
            faulthandler.disable()
            for alias in aliases:
                alias.zero_()
            os._exit(0)
        weight = model.stem.weight
        for read in (weight.to_local, weight.clone, lambda: weight + 1):
            assert ("forked process" in str(error_of(read))) is is_shared
        last = model.stem.weight.zero_ if is_shared else lambda: fs.global_norm(model.parameters())
        calls = (lambda: model(vectors(0, 0)["x"]), lambda: fs.full_state_dict(model), last)
        with torch.no_grad():
            found = {"forked process" in error_of(call) for call in calls}
        dist.GroupMember.WORLD = None
        assert "NO ERROR" in error_of(fs.shard(Chain(1).double()).stem.weight.clone)
        os.write(end, str([found, os.wait()[1]]).encode())
        time.sleep(60)

    def fork(model):
        aliases = [p.to_local() for p in model.parameters()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: fork
            children.append(os.fork())
            if children[0] == 0:
                try:
                    use(model, aliases)
                finally:
                    os._exit(1)
        os.close(end)
        return os.read(told, 100).decode()

    undisturbed, _ = losses_of(transport, lambda _: None)
    try:
        losses, found = losses_of(transport, fork)
    finally:
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)
    assert found == str([{True}, int(signal.SIGSEGV) if is_shared else 0])
    assert losses == undisturbed


def without_pidfd():
    real = os.pidfd_open

    def refused(pid):
        raise PermissionError(pid)

    os.pidfd_open = refused
    try:
        return segment.Host.here()
    finally:
        os.pidfd_open = real


def test_a_sandbox_without_process_descriptors_shares_nothing():
    assert without_pidfd() is None


@on_ranks(2)
def test_lack_of_host_memory_for_deferred_gradients_is_an_error_in_backward():
    model = chain()

    def populate(*_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with fs.no_sync(model):
        model(vectors(0, 0)["x"]).square().mean().backward()
    with (
        mock.patch.object(segment.Segment, "populate", populate),
        pytest.raises(OutOfMemoryError, match=r"transport shared: expected .*Cannot allocate mem"),
    ):
        model(vectors(0, 0)["x"]).square().mean().backward()
