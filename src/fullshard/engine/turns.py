"""An optimizer's update of state on disk, some elements at a time.

[Note: turns]
An optimizer updates all parameters in one call. If it is elementwise, which is tested
(engine/optimizers.py), it may be called once for each of many turns instead. A turn has pieces of
parameters, with the same elements of gradients and states. While the optimizer updates one turn in
memory, the next is read from disk, and the one before is written.

States of another form, such as the number of steps, belong to a whole parameter: each of its pieces
begins with their values from before the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from fullshard.engine._torch_compat import no_guard
from fullshard.engine.disk import PAGE, Disk, Room
from fullshard.planner.memory import DISK_ROOM, NUM_DISK_ROOMS

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
        for piece in _pieces(param, grad, optimizer.state.get(param, {}), num_bytes, grain):
            left -= sum(part.nbytes + 2 * PAGE for part in piece.parts)
            if left < 0 and turn:
                yield turn
                turn, left = [], num_bytes - sum(part.nbytes + 2 * PAGE for part in piece.parts)
            turn.append(piece)
    yield turn


def _pieces(
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
    for start in range(0, param.numel(), numel):
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
