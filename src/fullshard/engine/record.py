"""The record of a shard: the tensor of which it is a part, and its range.

[Note: shared memory]
`old = p.data` shares the memory of a shard, and `p.data = value` that of a value. In one process
they keep sharing it. Here a shard that was moved is copied back to its place in a flat buffer, so
tensors that share memory move together:

    p.data = value    `old` gets its own memory, because the place will be written; p joins `value`
    put back          `value` is copied to the place, which p and `value` share from then on

A write into one of them is a write into the parameter among them. All ranks know which tensors
share memory, also ranks without elements, whose tensors have no address.
"""

from __future__ import annotations

import math
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fullshard.engine._torch_compat import graph_task_id, no_guard, tree_leaves
from fullshard.engine.guard import READ_NOTHING, misfit
from fullshard.errors import EngineError
from fullshard.planner.layout import Slice, clean_name
from fullshard.transport.base import check_process
from fullshard.transport.segment import LOST, start_of

if TYPE_CHECKING:
    from fullshard.engine.cuts import Cut
    from fullshard.engine.homes import Residence
    from fullshard.engine.norms import GradientNorms
    from fullshard.transport.base import Home


BEFORE_READ: list[Callable[[Any, str | None], None]] = []


def before_read(values: Any, name: str | None = None) -> None:
    """Call what brings shards up to date (`BEFORE_READ`), before they are read or written.

    Args:
        values: Operands that contain the shards.
        name: The function that reads them if each rank may call it alone; None: all ranks call it.
    """
    if name not in READ_NOTHING:
        for call in BEFORE_READ:
            call(values, name)


def _check_memory(values: Any, _: str | None) -> None:
    """Check that shards are in memory of this process. See [Note: forked processes]."""
    with no_guard():
        places = [address_of(one) for one in tree_leaves(values) if isinstance(one, torch.Tensor)]
    if any(0 <= place - start_of(one) < len(one) for place in places for one in LOST):
        check_process(os.getppid())


os.register_at_fork(after_in_child=lambda: LOST and BEFORE_READ.insert(0, _check_memory))


@dataclass(eq=False, slots=True)
class Elements:
    """This rank's elements of a parameter.

    Attributes:
        piece: Name of the parameter and the range of its elements.
        cut: Placement on other axes of the mesh; `piece` then refers to the local tensor.
    """

    piece: Slice
    cut: Cut | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return tuple(self.piece.shape) if self.cut is None else self.cut.shape

    def local_of(self, whole: torch.Tensor) -> torch.Tensor:
        """(n_local,): this rank's elements of a tensor of the global shape."""
        local = whole if self.cut is None else self.cut.local_of(whole)
        return local.detach().reshape(-1)[self.piece.start : self.piece.stop]


@dataclass(eq=False, slots=True)
class ShardRecord(Elements):
    """The record of a shard: the tensor of which it is a part, and its range.

    Attributes:
        unit: Title of the unit that gathers it.
        index: Index among the model's trained parameters, for cached norms; -1 if frozen.
        is_cut: Whether some rank stores only a part of the parameter.
        copies: Number of ranks with the same elements.
        holders: (part, start, stop) of each part of the (local) tensor; the same on every rank.
        norms: Global norms of the model's gradients.
        home: The memory that has these elements.
        gather: Gathers the full tensor from (n_local,) plain elements; None: those of the
            parameter. A collective.
        post_accumulate: The user's hooks, called with the reduced gradient.
        states: Allocates optimizer states; None if they are on the device of the parameter.
        compute: Returns the compute parameter if it shares memory with the whole parameter.
        member: The parameter's `Member`, weakly.
        address: Where the parameter was placed; see `address_of`.
        last_write: Number of the last write into it.
    """

    unit: str
    index: int
    is_cut: bool
    copies: int
    holders: Sequence[tuple[int, int, int]]
    norms: GradientNorms
    home: Home
    gather: Callable[..., torch.Tensor]
    post_accumulate: OrderedDict[int, Callable[[torch.Tensor], None]]
    states: Residence | None = None
    compute: Callable[[], nn.Parameter] | None = None
    member: Callable[[], Any] | None = None
    address: int = 0
    last_write: int = 0

    def __reduce__(self) -> Any:
        return type(None), ()  # a whole parameter may be pickled inside forward

    def is_cut_like(self, other: ShardRecord) -> bool:
        """Whether every rank has the same elements of both. Equal on all ranks."""
        one, two = self.piece, other.piece
        is_alike = (one.shape, self.cut, self.copies) == (two.shape, other.cut, other.copies)
        return is_alike and self.holders == other.holders

    def shape_of(self, shard: Any) -> tuple[int, ...]:
        """The global shape of a shard with this record, which is flat for `p.view(-1)`.

        Raises:
            ShardedTensorError: It was viewed with another number of dimensions.
        """
        shape, dims = self.shape, shard.dim()
        if not self.is_cut and self.cut is None:
            return tuple(shard.shape)
        if dims in (len(shape), max(1, len(shape))):
            return shape
        if dims == 1 or len(shape) <= 1:
            return (math.prod(shape), *(1 for _ in range(dims - 1)))
        raise misfit("full_tensor", shard, f"a view of {dims} dimensions")

    def describe(self) -> str:
        """Name, global shape and range."""
        p, of = self.piece, ""
        if self.cut is not None:
            of = f", cut to {tuple(p.shape)} by {self.cut.describe()}"
        where = f"elements [{p.start}, {p.stop})"
        return f"{clean_name(p.name)!r}, global shape {self.shape}{of}, {where}"


def address_of(shard: torch.Tensor) -> int:
    """The address of a shard's elements, or of its storage if it has none. Outside the guard.

    All ranks therefore detect a moved parameter, even ranks without an element of it. It is 0 for
    one whose elements are in another order (`p.data = p.data.t()`).
    """
    if not shard.is_contiguous():
        return 0
    return shard.data_ptr() or shard.untyped_storage().data_ptr()


class Sharing:
    """Tensors that share memory, all from the same address. See [Note: shared memory].

    They refer to it, and it to its parameters, so that an alias keeps its parameter alive. A
    parameter in its own place refers to it weakly: without an alias it ends. One with assigned data
    refers to it until it is put back.

    Attributes:
        params: The parameters among them, by id.
    """

    def __init__(self) -> None:
        self.params: dict[int, Any] = {}
        self._others: dict[int, weakref.ref[Any]] = {}

    def __len__(self) -> int:
        """The number of parameters among them."""
        return len(self.params)

    def add(self, tensor: Any) -> None:
        """Add a tensor that begins where the others do."""
        tensor.shares = self
        if tensor.is_at_rest:
            self.params[id(tensor)] = tensor
            return
        if not (count := len(self._others)) & (count - 1):  # now and then
            for key in [key for key, weak in list(self._others.items()) if weak() is None]:
                self._others.pop(key, None)
        self._others[id(tensor)] = weakref.ref(tensor)  # in one step: another thread may add more

    def drop(self, tensor: Any) -> None:
        """Remove a tensor that gets other memory."""
        self.params.pop(id(tensor), None)
        self._others.pop(id(tensor), None)
        tensor.shares = None

    def tensors(self) -> list[Any]:
        """All of them."""
        others = [weak() for weak in list(self._others.values())]
        return [*self.params.values(), *[x for x in others if x is not None]]

    def move(self, flat: torch.Tensor) -> None:
        """Let all of them share other flat memory, with the same elements. Outside the guard.

        Those of a whole value (`p.data = whole; p.data`) are cut on all ranks alike.
        """
        for tensor in self.tensors():
            is_cut, dims = tensor.record.is_cut, tensor.dim()
            same = flat if flat.dtype is tensor.dtype else flat.view(tensor.dtype)
            tensor.data = same.view((-1, *[1] * (dims - 1)) if is_cut else tensor.shape)


def sharing_of(tensor: Any, *, makes: bool = False) -> Any:
    """The `Sharing` of a tensor; None if none is known, or one that is made."""
    found = tensor.shares() if isinstance(tensor.shares, weakref.ref) else tensor.shares
    if found is None and makes:
        found = Sharing()
        found.add(tensor)
        with no_guard():
            if tensor.is_at_rest and address_of(tensor) == tensor.record.address:
                tensor.shares = weakref.ref(found)
    return found


def change_memory(tensor: Any, theirs: Sharing | None) -> None:
    """Note that a tensor has the memory of others now; None: memory of its own."""
    before = sharing_of(tensor)
    if before is theirs:
        return
    if before is not None:
        was_in_place = isinstance(tensor.shares, weakref.ref)
        before.drop(tensor)
        for other in before.tensors()[:1] if was_in_place else ():  # the place is written later
            with no_guard():
                before.move(other.detach().reshape(-1).clone())
    if theirs is not None:
        theirs.add(tensor)


def take_along(param: Any, place: torch.Tensor) -> None:
    """Let tensors that shared a parameter's memory share its new place. Outside the guard."""
    found = sharing_of(param)
    if found is None:
        return
    if len(found.params) > 1:  # the others stay with another parameter
        found.drop(param)
        return
    for tensor in found.tensors():
        if tensor.record.is_cut_like(param.record):
            tensor.record = param.record
        else:
            found.drop(tensor)
    found.move(place)
    param.shares = weakref.ref(found)


def follow_freezing(member: Any) -> None:
    """Copy `requires_grad` from a shard to its compute parameter. Outside the guard.

    Raises:
        EngineError: The parameter was frozen when it was sharded.
    """
    wanted = member.param.requires_grad
    if wanted and not member.group.plan.trainable:
        raise EngineError(
            f"{member.piece.name}: expected requires_grad=False as when it was sharded; its unit "
            "has no gradient memory for it. Set requires_grad before fs.shard."
        )
    if member.compute.requires_grad is not wanted:
        torch.Tensor.requires_grad_(member.compute, wanted)


def freeze(func: Any, _name: str, like: Any, args: Any, kwargs: Any) -> Any:
    """p.requires_grad = x: graphs contain the compute parameter, which follows at once."""
    with no_guard():
        result, find = func(*args, **kwargs), like.record.member
        member = None if find is None else find()
        # A frozen parameter at rest may be trained for a while; see `Group.follow_freezing`.
        if member is not None and (member.group.plan.trainable or member.group.unit.swapped):
            follow_freezing(member)
    return result


def check_fresh(unit: Any, home: Home, num_followed: int, module: nn.Module | None = None) -> None:
    """Check that no shard was written after its unit's slot was filled.

    Args:
        unit: The unit.
        home: The memory of its shards.
        num_followed: Number of writes into shards that slots have followed.
        module: A module of it, whose forward has read its parameters; None: all will be read.

    Raises:
        EngineError: One was; the slot has its old values, and other ranks may still write.
    """
    if home.num_writes == num_followed:
        return
    what = "forward" if graph_task_id() == -1 else "backward"
    inside = None if module is None else {id(param) for param in module._parameters.values()}
    for group in unit.groups:
        for member in group.members if group.gathers or group.plan.shared else ():
            is_read = inside is None or id(member.compute) in inside
            if is_read and member.param.record.last_write > num_followed:
                raise EngineError(
                    f"{member.piece.name}: expected a {what} of {unit.plan.title} that does not "
                    "write the shards that it reads; it wrote this shard, while the slot contains "
                    f"the old values. Write before or after the {what}, or make the averaged "
                    "module a unit of its own (wrap)."
                )
