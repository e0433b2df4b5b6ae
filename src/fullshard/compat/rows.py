"""DTensors of each rank's rows, which state dicts of FSDP2's facade contain.

torch's share the memory of weights and of optimizer states, and scripts rely on it: they save a
state dict that was taken long ago, or read a checkpoint into one and drop it. Ours are copies that
follow: reading them gathers new values, and what was written is loaded before the next use of a
shard by all ranks.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, count
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from fullshard.compat.errors import MisuseError
from fullshard.compat.wrapping import engine_for, everyones, record_of, topology
from fullshard.engine.engine import Engine
from fullshard.engine.full_state import whole_params
from fullshard.engine.norms import from_host
from fullshard.engine.optimizers import loaded_state
from fullshard.engine.parameter import ShardedGradient, ShardedParameter, params_of, shards_in
from fullshard.planner.mesh import Mesh


def rows_of(engine: Engine, whole: torch.Tensor, mesh: Any = None) -> DTensor:
    """Returns this rank's rows of a full tensor as a DTensor; 0-dim tensors are replicated."""
    mesh = mesh if mesh is not None else device_mesh(engine.plan.mesh, engine.device.type)
    return own_rows(whole, mesh, engine.plan.mesh, engine.rank)


def own_rows(whole: torch.Tensor, on: DeviceMesh, mesh: Mesh, rank: int) -> DTensor:
    """The same, on a device mesh of a mesh."""
    placements = placements_of(mesh, on.ndim, whole.dim())
    local = whole
    if placements[-1] != Replicate():
        parts = list(whole.chunk(mesh.shard))
        at = mesh.coordinates(rank)[1]
        local = parts[at] if at < len(parts) else whole[:0]
    return DTensor.from_local(
        local.clone(), on, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def placements_of(mesh: Mesh, num_axes: int, num_dims: int) -> tuple[Any, ...]:
    """The placements of rows on a device mesh with this number of axes."""
    last = Shard(0) if num_dims and mesh.shard > 1 else Replicate()
    return (*(Replicate() for _ in range(num_axes - 1)), last)


_MESHES: WeakKeyDictionary[Any, dict[Any, DeviceMesh]] = WeakKeyDictionary()  # by default group


def device_mesh(mesh: Mesh, kind: str) -> DeviceMesh:
    """torch's device mesh of all ranks for this device type."""
    both = mesh.replicate, mesh.shard
    sizes = (mesh.world_size,) if 1 in both else both
    made = _MESHES.setdefault(dist.group.WORLD, {})
    key = (sizes, mesh.order, kind)
    if key not in made:
        order = torch.tensor(mesh.order).view(sizes) if mesh.order else None
        made[key] = init_device_mesh(kind, sizes) if order is None else DeviceMesh(kind, order)
    return made[key]


class FollowingRows(DTensor):
    """Rows that follow a weight or a state; all state dicts that are kept contain the same.

    The first read after a change gathers all rows of the model or optimizer: a collective.
    """

    @property
    def _local_tensor(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self in _SOURCES:
            _SOURCES[self].update()
            _TAKEN.lent.add(_SOURCES[self].norms)
        return _LOCAL.__get__(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "").partition(".")[0]
        if name.startswith(LIST_FUNCTIONS) and name.endswith("_"):  # they count no versions
            is_foreach = name.startswith("_foreach_")
            for row in tree_leaves((args[:1] if is_foreach else args, kwargs)):
                if isinstance(row, FollowingRows):
                    increment_version(_LOCAL.__get__(row))
        return result

    def detach(self) -> DTensor:
        """Itself, which is not part of a graph: modules detach the tensors that they save."""
        return self

    @property
    def data(self) -> DTensor:
        """Itself: a write into torch's `data` counts nowhere."""
        return self

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.copy_(value)

    def requires_grad_(self, *args: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """An independent copy: `load_state_dict(assign=True)` makes a parameter of it."""
        copy: Any = self.plain().clone()
        copy.__class__ = FollowingRows
        return DTensor.requires_grad_(copy, *args)

    def plain(self) -> DTensor:
        """The same rows, as they are now, in torch's own class."""
        return DTensor.from_local(
            self._local_tensor, self.device_mesh, self.placements, run_check=False,
            shape=self.shape, stride=self.stride()
        )  # fmt: skip

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def __copy__(self) -> DTensor:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self.plain().clone()


_LOCAL: Any = DTensor._local_tensor  # its slot
_SOURCES: Any = WeakIdKeyDictionary()  # by rows; torch's stager copies their attributes
_ROWS = "_fullshard_rows"  # of a shard that had rows once: a number, equal on all ranks; its rows
_NUMBERS = count()
LIST_FUNCTIONS = ("_foreach_", "_fused_", "_amp_")


class _Owner(ABC):
    """What has the shards: a marked module, or an optimizer."""

    def __init__(self, of: Any) -> None:
        self.ref: Any = weakref.ref(of)

    @abstractmethod
    def params(self) -> list[Any]:
        """The weights, or those of which it has states."""

    def num_writes(self) -> Any:
        """What changes with each write of a weight; None: only the shards tell."""
        return None

    @abstractmethod
    def gather(self) -> Iterator[tuple[Any, torch.Tensor]]:
        """Yields each shard that had rows once, and its full tensor. A collective."""


class Weights(_Owner):
    """A marked module as the owner of its weights."""

    def params(self) -> list[Any]:
        """All of the module."""
        return list(self.ref().parameters())

    def num_writes(self) -> Any:
        """Those that the engine has seen: `p.data.mul_` counts here, too."""
        module = self.ref()
        engine = None if module is None else record_of(module).engine_ref()
        return None if engine is None else (id(engine.home), engine.home.num_writes)

    def gather(self) -> Iterator[tuple[Any, torch.Tensor]]:
        """One unit after another."""
        engine = engine_for(self.ref())
        params = (member.param for group in engine.groups for member in group.members)
        had = {param.record.piece.name: param for param in params if hasattr(param, _ROWS)}
        return ((had[name], whole) for name, whole in whole_params(engine, had))


class States(_Owner):
    """An optimizer as the owner of its states."""

    def params(self) -> list[Any]:
        """All of its groups."""
        return [param for group in self.ref().param_groups for param in group["params"]]

    def gather(self) -> Iterator[tuple[Any, torch.Tensor]]:
        """One state after another."""
        values = (value for entry in self.ref().state.values() for value in entry.values())
        shards = [value for value in values if hasattr(value, _ROWS)]
        return ((shard, shard.full_tensor()) for shard in shards)


class _Source:
    """What rows follow.

    Attributes:
        row: Returns the rows; they own this object.
        shard: A weight, or a state of an optimizer.
        param: The weight of which it is a state, or itself.
        owner: The module or optimizer that was last asked for the rows.
        mesh: The mesh of the engine.
        rank: Number of this rank in the mesh.
        seen: What changes with the shard, and the rows' version, when both were last equal.
    """

    def __init__(self, row: Any, shard: Any, param: Any, engine: Engine) -> None:
        self.row: Any = weakref.ref(row)
        self.shard, self.param = shard, param
        self.mesh, self.rank = engine.plan.mesh, engine.rank
        self.owner: Any = None
        self.seen: Any = None

    @property
    def number(self) -> int:
        """The number of its shard."""
        return getattr(self.shard, _ROWS)[0]

    @property
    def norms(self) -> Any:
        """Those of its model: what its ranks compare goes through them."""
        return self.param.record.norms

    def _now(self) -> tuple[Any, Any, int]:
        row, record = self.row(), self.param.record  # writes count at rows, or at their local part
        own = record, record.last_write, self.shard._version  # fused kernels count only the second
        return self.owner.num_writes(), own, row._version + _LOCAL.__get__(row)._version

    def take(self, rows: DTensor) -> None:
        """Copies rows of the shard as it is now."""
        _LOCAL.__get__(self.row()).copy_(_LOCAL.__get__(rows))
        self.seen = self._now()

    def _read(self, whole: torch.Tensor) -> None:
        self.take(own_rows(whole, self.row().device_mesh, self.mesh, self.rank))

    def _is_changed(self) -> bool:
        """Whether the shard was written; of a deleted model, only the shard itself tells."""
        seen, now = self.seen, self._now()
        return (now[0] is not None and now[0] != seen[0]) or now[1] != seen[1]

    def is_written(self) -> bool:
        """Whether rows were written and not loaded.

        Raises:
            MisuseError: The shard was written too.
        """
        row = self.row()
        if row is None or self.owner.ref() is None or self._now()[2] == self.seen[2]:
            return False
        if not isinstance(self.param, ShardedParameter):  # inside `unshard`: loaded afterwards
            return False
        if self._is_changed():
            raise self.misuse("before the weights changed")
        return True

    def misuse(self, when: str) -> MisuseError:
        return MisuseError(
            f"{self.param.record.piece.name}: expected load_state_dict() of a state dict that was "
            f"written, since its tensors are copies here; it was not called {when}. "
            "Call load_state_dict(state_dict) after reading a checkpoint into it."
        )

    def update(self) -> None:
        """Reads all rows of the owner again if the shard of these has changed."""
        if not self._is_changed() or self.is_written():
            return
        owner = self.owner if self.owner.ref() is not None else None
        with settled(owner.params() if owner is not None else ()):
            for shard, whole in owner.gather() if owner is not None else ():
                row = _row_of(shard)
                if row is not None:
                    _SOURCES[row]._read(whole)
            if self._is_changed():  # no longer one of the owner's
                self._read(self.shard.full_tensor())

    def set_loaded(self) -> None:
        """Takes rows that were written as loaded."""
        self.seen = (*self.seen[:2], self._now()[2])


def _row_of(shard: Any) -> Any:
    """The rows of a shard; None if it has none."""
    found = getattr(shard, _ROWS, None)
    return None if found is None else found[1]()


class _Taken:
    """Rows since the last forward of their model. Norms stand for a model, as its ranks compare.

    Attributes:
        rows: Those of new state dicts by owner and number; they may be dropped after a write.
        new: Models that have some, on all ranks alike: one rank alone may have written them.
        lent: Models of which the memory of rows was read or written.
        is_settled: Whether written rows were loaded and none is written now.
    """

    def __init__(self) -> None:
        self.rows: WeakKeyDictionary[Any, dict[int, Any]] = WeakKeyDictionary()
        self.new: WeakSet[Any] = WeakSet()
        self.lent: WeakSet[Any] = WeakSet()
        self.is_settled = False


_TAKEN = _Taken()


def settle(values: Iterable[Any]) -> None:
    """Loads rows that were written, of the models of these shards.

    A collective if there are new or written rows of these models; its ranks compare that all ask.
    """
    if (_SOURCES or _TAKEN.new) and not _TAKEN.is_settled:
        for norms in {shard.record.norms: None for shard in shards_in(values)}:
            _settle(norms)


def _settle(norms: Any) -> None:
    alive = {one.number: (row, one) for row, one in list(_SOURCES.items()) if one.norms is norms}
    numbers = sorted(number for number, (_, one) in alive.items() if one.is_written())
    if not (numbers or norms in _TAKEN.new):
        return
    own = from_host([float(len(numbers))], norms.device)
    if not norms.all_reduce(own, "state dicts that were written").item():
        return
    # `dcp.load` writes no rows of a rank that has none of a weight
    numbers = sorted({number for all_of in everyones(numbers) for number in all_of})
    written = [alive[number] for number in numbers]
    values = [row.plain() for row, _ in written]
    for _, one in written:
        one.set_loaded()
    with torch.no_grad():
        for (_, one), value in zip(written, values, strict=True):
            one.shard.copy_(loaded_state(one.param, value.full_tensor()))


@contextmanager
def settled(values: Iterable[Any]) -> Generator[None]:
    """Loads rows that were written, once for all reads inside. A collective."""
    settle(values)
    before, _TAKEN.is_settled = _TAKEN.is_settled, True
    try:
        yield
    finally:
        _TAKEN.is_settled = before


def before_change(engine: Engine) -> None:
    """The same, before a forward or a new engine; rows that the script dropped may go."""
    settle(member.param for member in engine.members)
    for held in _TAKEN.rows.values():
        for number in [n for n, row in held.items() if _SOURCES[row].norms is engine.norms]:
            del held[number]
    _TAKEN.new.discard(engine.norms)
    _TAKEN.lent.discard(engine.norms)


def before_step(optimizer: Any) -> None:
    """The same, before a step of an optimizer."""
    settle(States(optimizer).params())


def before_read(values: Any, name: str | None) -> None:
    """The same, before shards are read; a function that a rank may call alone is refused."""
    if name is None or (_TAKEN.lent and topology().world_size == 1):
        settle(x for x in shards_in(values) if not isinstance(x, ShardedGradient))
    elif _TAKEN.lent and not _TAKEN.is_settled:
        shards = shards_in(values)
        for row in map(_row_of, [*shards, *chain.from_iterable(map(params_of, shards))]):
            if row is not None and _SOURCES[row].is_written():
                raise _SOURCES[row].misuse(f"before {name} of this rank's part")


def follow(owner: _Owner, engine: Engine, shard: Any, param: Any, value: DTensor) -> DTensor:
    """Rows that follow a shard: those that the script has, as torch's share memory, or these."""
    row = _row_of(shard)
    if row is None or row.dtype != value.dtype or row.placements != value.placements:
        if row is not None:
            del _SOURCES[row]  # as a tensor before `model.half()`
        row: Any = value
        row.__class__ = FollowingRows
        _SOURCES[row] = _Source(row, shard, param, engine)
        number, *_ = getattr(shard, _ROWS, None) or (next(_NUMBERS),)  # equal on all ranks
        setattr(shard, _ROWS, (number, weakref.ref(row)))
    one = _SOURCES[row]
    one.owner = owner
    one.take(value)
    _TAKEN.rows.setdefault(owner.ref(), {})[one.number] = row
    _TAKEN.new.add(one.norms)
    return row


def shard_of(value: Any) -> Any:
    """The shard that rows follow; another value itself."""
    one = _SOURCES.get(value) if isinstance(value, FollowingRows) else None
    return value if one is None else one.shard


def unfollowed(state: Mapping[Any, Any], params: Iterable[Any]) -> dict[Any, Any]:
    """A state dict to load, of rows as they are before the first weight changes. A collective.

    Args:
        state: Rows and other values.
        params: The weights that it is loaded into, or those whose states it is loaded into.
    """
    settle([*params, *(shard_of(value) for value in state.values())])
    return {key: v.plain() if isinstance(v, FollowingRows) else v for key, v in state.items()}
