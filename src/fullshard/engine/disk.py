"""State on disk: mapped files that large uses read and write directly.

[Note: state on disk]
Any code may use state on disk at any time, because its files are mapped: the kernel reads missing
pages. This costs a page fault for every 4 KiB, and most of them wait for the disk. The
three large uses of a step therefore read and write the files directly, on two threads during
compute, and without the page cache where the file system allows it:

    a step    gather of unit k    gradients of unit k    update of turn k ([Note: turns])
    reads     unit k + 1                                 turn k + 1
    writes                        unit k + 1             turn k - 1

The kernel keeps mappings and direct access coherent if they alternate: it writes changed pages
before a direct read, and drops pages before a direct write. A page, or its neighbours in one large
folio, that is read again during direct writes would be stale. A mapping is therefore never used
during direct writes to the same file: only the writing thread writes data that does not fill a
page, and parameters, gradients and states have files of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch

from fullshard.engine._torch_compat import no_guard
from fullshard.errors import ConfigError, EngineError
from fullshard.planner.memory import DISK_PIECE, DISK_ROOM, NUM_DISK_ROOMS
from fullshard.transport.base import Works, check_process
from fullshard.transport.segment import protect

FILE_BYTES = 1 << 30  # of a file, which takes space as tensors are put into it
PAGE = mmap.PAGESIZE
PUNCH_HOLE = 3  # a mode of fallocate, which keeps the file's size


@dataclass(frozen=True)
class Extent:
    """The range of a file that contains a tensor."""

    descriptor: int
    offset: int
    nbytes: int
    process: int  # which may write them


class _File:
    """A file without a name. Its space is free when no tensor is in it, or the process ends."""

    def __init__(self, folder: str, nbytes: int) -> None:
        self.nbytes, self.used, self.process = nbytes, 0, os.getpid()
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".fullshard-") as file:
            os.ftruncate(file.fileno(), nbytes)
            self.mapping: mmap.mmap | None = mmap.mmap(file.fileno(), nbytes)
            self._plain = self.descriptor = os.dup(file.fileno())
            with contextlib.suppress(OSError):  # a file system without it
                self.descriptor = os.open(file.name, os.O_RDWR | os.O_DIRECT)
        _MAPPINGS.add(self.mapping)
        self.address = torch.frombuffer(self.mapping, dtype=torch.uint8).data_ptr()
        descriptors = {self._plain, self.descriptor}
        self.alive = weakref.finalize(self.mapping, lambda: [*map(os.close, descriptors)])
        self.alive.atexit = False

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        offset, nbytes = self.used, numel * dtype.itemsize
        os.posix_fallocate(self._plain, offset, nbytes)
        self.used = offset + _rounded(nbytes)
        memory = memoryview(self.mapping)[offset : offset + nbytes]  # type: ignore[arg-type]
        weakref.finalize(memory, self._free, offset, nbytes).atexit = False
        return torch.frombuffer(memory, dtype=dtype)

    def _free(self, offset: int, nbytes: int) -> None:
        """Give a tensor's space back to the disk."""
        if self.alive.alive and self.process == os.getpid():  # a forked process has the same files
            place, size = ctypes.c_int64(offset), ctypes.c_int64(_rounded(nbytes))
            ctypes.CDLL(None).fallocate(self.descriptor, PUNCH_HOLE, place, size)


class Room:
    """Memory for direct reads and writes; private memory would not be safe during a fork.

    Attributes:
        used: Bytes that tensors have taken.
    """

    def __init__(self, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, nbytes)  # begins at a page, as direct uses require
        self._bytes = memoryview(self._memory)
        self._address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self.used = 0

    def take(self, like: torch.Tensor, place: Extent) -> torch.Tensor:
        """Room for a tensor, as far from the start of a page as on disk."""
        at = self.used + place.offset % PAGE
        self.used = _rounded(at + place.nbytes)
        flat = torch.frombuffer(self._memory, dtype=like.dtype, count=like.numel(), offset=at)
        return flat.view(like.shape)

    def read(self, like: torch.Tensor, place: Extent) -> torch.Tensor:
        """Reads whole pages into new room; returns the tensor in it."""
        at, taken = self.used, self.take(like, place)
        first = place.offset - place.offset % PAGE
        while at < self.used:
            done = _moved(os.preadv, place, self._bytes[at : self.used], first)
            at, first = at + done, first + done
        return taken

    def write(self, to: torch.Tensor, place: Extent, taken: torch.Tensor) -> None:
        """Writes a tensor that has taken room: whole pages directly, others through the mapping."""
        check_process(place.process)
        stop = place.offset + place.nbytes
        first, last = _rounded(place.offset), stop - stop % PAGE
        if first >= last:
            to.copy_(taken)
            return
        at = taken.data_ptr() - self._address - place.offset  # of the file's start
        while first < last:
            piece = self._bytes[at + first : at + last]
            first += _moved(os.pwritev, place, piece, first)
        head, tail = -place.offset % PAGE // to.itemsize, stop % PAGE // to.itemsize
        for edge in (slice(0, head), slice(to.numel() - tail, None)):
            to.view(-1)[edge].copy_(taken.view(-1)[edge])


class Disk:
    """The state of one model on this rank's disk.

    Args:
        folder: A folder on the disk.

    Attributes:
        reader: The thread that reads.
        writer: The thread that writes.
        begin: Starts the last gather, which this rank may never wait for while a peer does.
    """

    def __init__(self, folder: str) -> None:
        self._folder, self._files = folder, list[_File]()
        self._open: dict[str, _File] = {}  # by kind of state
        self.start()
        _DISKS.add(self)
        self.begin: Callable[[], object] = lambda: None

    def start(self) -> None:
        """Make threads and rooms, again in a forked process, which has none of its own."""
        self.reader, self.writer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._to_read, self._to_write = Room(DISK_PIECE), Room(DISK_PIECE)
        vars(self).pop("rooms", None)

    @cached_property
    def rooms(self) -> list[Room]:
        """Rooms for the turns of an update."""
        return [Room(DISK_ROOM) for _ in range(NUM_DISK_ROOMS)]

    def zeros(self, numel: int, dtype: torch.dtype, kind: str) -> torch.Tensor:
        """Allocates (numel,) zeros.

        Args:
            numel: Number of elements.
            dtype: Dtype of the elements.
            kind: Kind of the state.

        Raises:
            ConfigError: The folder is not there, not to be written, or its disk is full.
        """
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        nbytes = numel * dtype.itemsize
        try:
            file = self._open.get(kind)
            if file is None or file.used + nbytes > file.nbytes:
                if file is not None:
                    file.mapping = None  # its tensors keep it
                file = self._open[kind] = _File(self._folder, max(FILE_BYTES, _rounded(nbytes)))
                self._files = [*(file for file in self._files if file.alive.alive), file]
            return file.zeros(numel, dtype)
        except OSError as error:
            raise ConfigError(
                f"state on nvme: expected {nbytes:,} bytes in '{self._folder}'; "
                f"{error.strerror}. Use a folder on a disk with enough space (offload.folder; for "
                "the teacher of a distillation: output_dir), and start again."
            ) from error

    def place_of(self, tensor: torch.Tensor) -> Extent | None:
        """Returns the place of a tensor on disk; None if it is in memory."""
        if tensor.device.type == "cpu":
            at = tensor.data_ptr()
            for file in self._files:
                if file.address <= at < file.address + file.nbytes and file.alive.alive:
                    return Extent(file.descriptor, at - file.address, tensor.nbytes, file.process)
        return None

    # ---- one read, and one write or change, at a time, on any thread

    def read(self, tensor: torch.Tensor, to: torch.Tensor) -> None:
        """Copies a flat tensor on disk to one of any dtype and device."""
        for piece, target in zip(*_pieces(tensor, to), strict=True):
            place, self._to_read.used = self.place_of(piece), 0
            source = piece if place is None else self._to_read.read(piece, place)
            target.copy_(source)

    def change(
        self,
        tensor: torch.Tensor,
        change: Callable[..., object],
        *others: torch.Tensor,
        reads: bool = True,
    ) -> None:
        """Call `change` with pieces of a flat tensor on disk, which it writes, and of others.

        Args:
            tensor: Tensor on disk.
            change: Writes its first argument in place.
            others: Tensors of the same size.
            reads: Whether it uses the old values.
        """
        room = self._to_write
        for piece, *beside in zip(*_pieces(tensor, *others), strict=True):
            place, room.used = self.place_of(piece), 0
            if place is None:
                change(piece, *beside)
            else:
                taken = (room.read if reads else room.take)(piece, place)
                change(taken, *beside)
                room.write(piece, place, taken)

    # ---- during compute

    def stream(self, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Reads tensors into memory, each until the next but one."""
        loads = deque[Future[torch.Tensor]]()
        for at, tensor in enumerate(tensors):
            loads.append(self.reader.submit(self._taken, tensor, self.rooms[at % 2]))
            if at > 0:
                yield loads.popleft().result()
        yield from (load.result() for load in loads)

    def _taken(self, tensor: torch.Tensor, room: Room) -> torch.Tensor:
        place, room.used = self.place_of(tensor), 0
        if place is None or tensor.nbytes > DISK_ROOM - 2 * PAGE:
            return tensor
        return room.read(tensor, place)

    def load(self, tensor: torch.Tensor, to: torch.Tensor) -> Future[None] | None:
        """Starts to copy a flat tensor on disk; to a GPU, copies it on the current stream."""
        if to.device.type == "cpu":
            return self.reader.submit(self.read, tensor, to)
        self.read(tensor, to)
        return None

    def gather(self, loads: Sequence[Future[None]], start: Callable[[], Works]) -> Works:
        """Returns a gather, which starts at the next call of `begin` or when it is waited for.

        Args:
            loads: The running reads of this rank's parts, for which it waits first.
            start: Starts to fetch the other ranks' parts.
        """

        @cache
        def begin() -> Works:
            for load in loads:
                load.result()
            return start()

        self.begin = begin
        return Works((), first=lambda: begin().wait())

    def drain(self) -> None:
        """Wait until this thread may use the mappings."""
        for thread in (self.reader, self.writer):
            thread.submit(int).result()

    def to_disk(self, copy: Callable[[], None]) -> Iterator[None]:
        """A copy during compute, with the interface of `Gradients.to_host`."""
        running = self.writer.submit(copy)
        yield
        running.result()


_DISKS: weakref.WeakSet[Disk] = weakref.WeakSet()
_MAPPINGS: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def _forked() -> None:
    """A forked process reads state with threads of its own, and cannot write it."""
    for mapping in _MAPPINGS:
        protect(mapping, mmap.PROT_READ)
    for disk in _DISKS:
        disk.start()


os.register_at_fork(after_in_child=_forked)


def _moved(call: Callable[..., int], place: Extent, piece: memoryview, at: int) -> int:
    """Number of bytes of a file that a call has read or written.

    Raises:
        EngineError: The call read or wrote no bytes.
    """
    try:
        if done := call(place.descriptor, [piece], at):
            return done
        error = "the file ends there"
    except OSError as failed:
        error = failed.strerror
    raise EngineError(
        f"state on nvme: expected {call.__name__} of {piece.nbytes:,} bytes; {error}. The disk is "
        "damaged, full or not mounted. Use a folder on another disk (offload.folder), and resume."
    )


def _rounded(nbytes: int) -> int:
    """Rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def _pieces(*tensors: torch.Tensor) -> list[Sequence[torch.Tensor]]:
    """Flat tensors of one size in pieces that fit into a room, wherever they begin in a page."""
    numel = (DISK_PIECE - 2 * PAGE) // tensors[0].itemsize
    return [tensor.split(numel) for tensor in tensors]


# ---- turns of an optimizer -----------------------------------------------------------------------
# [Note: turns]
# An optimizer updates all parameters in one call. If it is elementwise, which is tested
# (engine/optimizers.py), it may be called once for each of many turns instead. A turn has pieces of
# parameters, with the same elements of gradients and states. While the optimizer updates one turn
# in memory, the next is read from disk, and the one before is written.
#
# States of another form, such as the number of steps, belong to a whole parameter: each of its
# pieces begins with their values from before the first.

Pair = tuple[Any, Any]  # a parameter and its gradient
_Taken = list[list[torch.Tensor]]  # of each piece


@dataclass
class _Piece:
    """Elements of a parameter, of its gradient and of its states.

    Attributes:
        whole: All elements of each of these, (numel,).
        others: The parameter's other states before its first piece, if it has several.
    """

    param: Any
    grad: Any
    start: int
    stop: int
    whole: list[tuple[Any, torch.Tensor]] = field(default_factory=list)
    others: dict[str, Any] | None = None

    @property
    def parts(self) -> list[torch.Tensor]:
        return [whole[self.start : self.stop] for _, whole in self.whole]


def step_in_turns(
    optimizer: torch.optim.Optimizer, disk: Disk, num_bytes: int = DISK_ROOM, grain: int = PAGE
) -> list[Pair]:
    """Update all parameters.

    Args:
        optimizer: Elementwise optimizer.
        disk: Has state of the parameters.
        num_bytes: Most bytes of a turn.
        grain: The number of elements of a piece is a multiple of this.

    Returns:
        Parameters and their gradients, which are None until `put_back`.
    """
    with no_guard():
        params = [p for group in optimizer.param_groups for p in group["params"]]
        pairs = [(p, p.grad) for p in params if p.grad is not None]
        for param, _ in pairs:
            param.grad = None
    stored = list[Future[None]]()
    loads = list[Future[_Taken]]()
    try:
        turns = list(_turns(optimizer, pairs, num_bytes, grain))
        for at in range(len(turns) + 1):
            if at < len(turns):
                free = stored[at - NUM_DISK_ROOMS] if at >= NUM_DISK_ROOMS else None
                room = disk.rooms[at % NUM_DISK_ROOMS]
                loads.append(disk.reader.submit(_read, disk, turns[at], room, free))
            if at > 0:
                taken = loads[at - 1].result()
                if not all(piece.whole for piece in turns[at - 1]):
                    disk.drain()  # the optimizer uses mappings
                _step_on(optimizer, turns[at - 1], taken)
                room = disk.rooms[(at - 1) % NUM_DISK_ROOMS]
                stored.append(disk.writer.submit(_write, disk, turns[at - 1], room, taken))
        for one in stored:
            one.result()
    except BaseException:
        disk.drain()
        put_back(pairs)
        raise
    return pairs


def put_back(pairs: list[Pair]) -> None:
    """Show gradients again after an update."""
    with no_guard():
        for param, grad in pairs:
            param.grad = grad
    pairs.clear()


def _turns(
    optimizer: torch.optim.Optimizer, pairs: Sequence[Pair], num_bytes: int, grain: int
) -> Iterator[list[_Piece]]:
    turn, left = list[_Piece](), num_bytes
    for param, grad in pairs:
        for piece in _pieces_of(param, grad, optimizer.state.get(param, {}), num_bytes, grain):
            left -= sum(part.nbytes + 2 * PAGE for part in piece.parts)
            if left < 0 and turn:
                yield turn
                turn, left = [], num_bytes - sum(part.nbytes + 2 * PAGE for part in piece.parts)
            turn.append(piece)
    yield turn


def _pieces_of(
    param: Any, grad: Any, state: dict[str, Any], num_bytes: int, grain: int
) -> Iterator[_Piece]:
    if not state:  # the optimizer makes it for the whole parameter
        yield _Piece(param, grad, 0, 0)
        return
    with no_guard():
        alike = [x for x in state.values() if torch.is_tensor(x) and x.shape == param.shape]
        whole = [(x, x.data.view(-1)) for x in (param, grad, *alike)]
    others = {k: v for k, v in state.items() if not any(v is x for x in alike)}
    per_element = sum(x.itemsize for _, x in whole)
    room = (num_bytes - 2 * PAGE * len(whole)) // per_element
    numel = max(1, room // grain) * grain
    is_cut = param.numel() > numel
    for start in range(0, max(1, param.numel()), numel):  # also counts the steps of empty shards
        stop = min(start + numel, param.numel())
        yield _Piece(param, grad, start, stop, whole, others if is_cut else None)


def _read(disk: Disk, turn: list[_Piece], room: Room, free: Future[None] | None) -> _Taken:
    """Read a turn into a room whose last turn has been written."""
    if free is not None:
        free.result()
    room.used = 0
    taken: _Taken = []
    for piece in turn:
        places = [(part, disk.place_of(part)) for part in piece.parts]
        taken.append([part if at is None else room.read(part, at) for part, at in places])
    return taken


def _write(disk: Disk, turn: list[_Piece], room: Room, taken: _Taken) -> None:
    """Write everything except the gradients, which the optimizer did not change."""
    with torch.inference_mode():  # the caller may have made states in it; it is this thread's
        for piece, tensors in zip(turn, taken, strict=True):
            for (x, _), part, tensor in zip(piece.whole, piece.parts, tensors, strict=True):
                place = disk.place_of(part)
                if x is not piece.grad and place is not None:
                    room.write(part, place, tensor)


def _step_on(optimizer: torch.optim.Optimizer, turn: list[_Piece], taken: _Taken) -> None:
    """Step on the elements of a turn, where they were taken."""
    step: Any = type(optimizer).step
    with no_guard():
        kept = [(x, x.data) for piece in turn for x, _ in piece.whole]
    try:
        with no_guard():
            for piece, tensors in zip(turn, taken, strict=True):
                for (x, _), tensor in zip(piece.whole, tensors, strict=True):
                    x.data = tensor
                piece.param.grad = piece.grad
                if piece.others is not None:
                    _set_others(optimizer.state[piece.param], piece)
        step.__wrapped__(optimizer)  # without hooks
    finally:
        with no_guard():
            for piece in turn:
                piece.param.grad = None
            for x, data in kept:
                x.data = data


def _set_others(state: dict[str, Any], piece: _Piece) -> None:
    """Keep a parameter's other states at its first piece, and restore them at later ones."""
    others: Any = piece.others
    for key, value in others.items():
        if piece.start == 0:
            others[key] = value.clone() if torch.is_tensor(value) else state[key]
        elif torch.is_tensor(value):
            state[key].copy_(value)
        else:
            state[key] = value
