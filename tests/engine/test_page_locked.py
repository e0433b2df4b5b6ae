"""Host memory of offloaded state is page-locked to the byte, and unlocked before it is unmapped."""

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fullshard.engine.homes import DeviceHomes, Residence
from fullshard.errors import OutOfMemoryError
from fullshard.planner.units import Homes, Place

NUMEL = (5 << 20) + 3  # just above a power of two
DEVICE = torch.device("cuda", 3)  # not each thread's current stream


class Cuda:
    """Records the memory that CUDA is asked to lock; `answer` is an error code."""

    def __init__(self, answer=0):
        self.answer, self.locked, self.idle = answer, {}, None

    def cudaHostRegister(self, address, nbytes, flags):
        assert is_mapped(address)
        self.locked[address] = nbytes
        return self.answer

    def cudaHostUnregister(self, address):
        assert is_mapped(address)  # CUDA would still write to pages with a new owner
        assert self.idle == DEVICE  # copies may still read them
        del self.locked[address]
        return 0


def is_mapped(address):
    spans = (
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()
    )
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in spans)


def on_cuda(monkeypatch, cuda):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: setattr(cuda, "idle", device))
    kinds = Homes(Place.HOST, Place.HOST, Place.HOST)
    return DeviceHomes.of(kinds, DEVICE, None).parameters


def test_pages_are_locked_to_the_byte_for_as_long_as_a_view_lives(monkeypatch):
    cuda = Cuda()
    shard = on_cuda(monkeypatch, cuda).zeros(NUMEL, torch.float32)
    assert cuda.locked == {shard.data_ptr(): 4 * NUMEL}
    assert shard.shape == (NUMEL,)
    assert not shard.any()
    view = shard.fill_(2.0)[7:9]
    del shard
    gc.collect()
    assert cuda.locked
    assert view.tolist() == [2.0, 2.0]
    address = view.data_ptr()
    del view
    gc.collect()
    assert cuda.locked == {}
    assert not is_mapped(address)


def test_nothing_is_locked_for_a_rank_without_elements(monkeypatch):
    cuda = Cuda()
    assert on_cuda(monkeypatch, cuda).zeros(0, torch.bfloat16).dtype is torch.bfloat16
    assert cuda.locked == {}


def test_memory_that_cannot_be_locked_is_named(monkeypatch):
    cuda = Cuda(answer=2)
    with pytest.raises(OutOfMemoryError, match=r"20,971,532 bytes of page-locked.*returned 2"):
        on_cuda(monkeypatch, cuda).zeros(NUMEL, torch.float32)
    gc.collect()
    assert cuda.locked  # memory that was never locked is not unlocked


def test_a_cpu_locks_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", SimpleNamespace)
    home = Residence.of(Place.HOST, torch.device("cpu"), None)
    assert home.zeros(4, torch.float64).tolist() == [0.0] * 4
