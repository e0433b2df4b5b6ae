"""DTensors of each rank's rows, which state dicts of FSDP2's facade contain.

torch's share the memory of weights and of optimizer states, and scripts rely on it: they save a
state dict that was taken long ago, or read a checkpoint into one and drop it. Ours are copies that
follow: reading them gathers new values, and what was written is loaded before the next use.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Self
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from fullshard.compat.errors import MisuseError
from fullshard.compat.wrapping import engine_for, everyones, record_of
from fullshard.engine.engine import Engine
from fullshard.engine.full_state import whole_params
from fullshard.engine.optimizers import loaded_state
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
    """Rows that follow a weight or a state.

    The first read after a change gathers all rows of the state dict again: a collective.
    """

    @property
    def _local_tensor(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self in _SOURCES:
            _SOURCES[self].update(self)
        return _LOCAL.__get__(self)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        result = super().__torch_dispatch__(func, types, args, kwargs or {})
        if func._schema.is_mutable:  # functions of lists count no versions at DTensors
            for row in tree_leaves((args, kwargs)):
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

    def __deepcopy__(self, memo: Any) -> Any:
        return self.plain().clone()


_LOCAL: Any = DTensor._local_tensor  # its slot
_SOURCES: Any = WeakIdKeyDictionary()  # by rows; torch's stager copies their attributes


class Cell(NamedTuple):
    """A shard that rows follow.

    Attributes:
        shard: A weight, or a state of an optimizer.
        param: The weight of which it is a state, or itself.
        mesh: The mesh of its engine.
        rank: Number of this rank in the mesh.
    """

    shard: Any
    param: Any
    mesh: Mesh
    rank: int

    @classmethod
    def of(cls, shard: Any, param: Any, engine: Engine) -> Self:
        """A cell of a shard of an engine."""
        return cls(shard, param, engine.plan.mesh, engine.rank)


class _Source:
    """What the rows of one state dict follow.

    Attributes:
        mesh: The device mesh that was asked for.
        count: Returns what changes with each update that version counters miss (fused kernels).
        gather: Yields name and full tensor of each cell. A collective.
        cells: The shards, by name.
        rows: Their rows, which own this object.
        seen: Version counters of shards and of rows when the rows were last equal to the shards.
    """

    def __init__(self, mesh: Any, count: Callable[[], Any], gather: Callable[..., Any]) -> None:
        self.mesh, self.count, self.gather = mesh, count, gather
        self.cells: dict[str, Cell] = {}
        self.rows: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self.seen: dict[str, tuple[Any, int]] = {}

    def fits(self, cells: Mapping[str, Cell]) -> bool:
        """Whether its rows are of these shards."""
        return all(
            name in cells
            and cells[name].shard is self.cells[name].shard
            and cells[name].shard.dtype is row.dtype
            for name, row in list(self.rows.items())
        )

    def take(self, cells: Mapping[str, Cell], values: dict[str, Any]) -> dict[str, Any]:
        """Rows with these values; hooks may have dropped some rows of the last state dict."""
        for name, value in values.items():
            row = self.rows.get(name)
            if row is not None:
                _LOCAL.__get__(row).copy_(value.to_local())
                values[name] = row
            elif isinstance(value, DTensor):
                self.cells[name], self.rows[name], _SOURCES[value] = cells[name], value, self
                value.__class__ = FollowingRows
            if isinstance(value, DTensor):
                self.seen[name] = self._versions(name)
        return values

    def name_of(self, row: FollowingRows) -> str:
        """The name of the shard of a row."""
        return next(name for name, one in self.rows.items() if one is row)

    def _versions(self, name: str) -> tuple[Any, int]:
        row = self.rows[name]  # writes count at it, or at its local tensor
        known = self.count(), self.cells[name].shard._version
        return known, row._version + _LOCAL.__get__(row)._version

    def is_written(self, name: str) -> bool:
        """Whether rows were written and not loaded."""
        return self._versions(name)[1] != self.seen[name][1]

    def _written(self) -> list[str]:
        """Rows that were written and not loaded.

        Raises:
            MisuseError: Their shards were written too.
        """
        written = [name for name in list(self.rows) if self.is_written(name)]
        for name in written:
            if self._versions(name)[0] != self.seen[name][0]:
                raise MisuseError(
                    f"{name}: expected load_state_dict() of a state dict that was written, since "
                    "its tensors are copies here; it was not called before the weights changed. "
                    "Call load_state_dict(state_dict) after reading a checkpoint into it."
                )
        return written

    def written_by_any(self, *, is_new: bool) -> list[str]:
        """Rows to be loaded.

        `is_new`: nothing was used since they were taken, so all ranks have them, and one alone may
        have written; a collective.
        """
        own = [] if self.count() is None else self._written()
        return sorted({n for names in everyones(own) for n in names}) if is_new else own

    def update(self, row: FollowingRows) -> None:
        """Reads all rows again if the shard of this one has changed."""
        name = self.name_of(row)
        if self.count() is None or self._versions(name)[0] == self.seen[name][0] or self._written():
            return
        settle()  # another state dict may have been written
        for name, whole in self.gather({name: cell.shard for name, cell in self.cells.items()}):
            if name in self.rows:
                one, cell = self.rows[name], self.cells[name]
                rows = own_rows(whole, one.device_mesh, cell.mesh, cell.rank)
                _LOCAL.__get__(one).copy_(rows.to_local())
                self.seen[name] = self._versions(name)

    def loaded(self, names: Iterable[str]) -> None:
        """Takes rows that were written as loaded."""
        self.seen.update({name: (self.seen[name][0], self._versions(name)[1]) for name in names})


# By module or optimizer: the last source, and its rows until the next forward or step, since they
# may be dropped after they were written.
_LAST: WeakKeyDictionary[Any, tuple[Any, list[Any]]] = WeakKeyDictionary()
_STEPS: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()


def settle() -> None:
    """Loads rows that were written. A collective."""
    sources = [(source(), bool(kept)) for source, kept in list(_LAST.values())]
    found = [(one, one.written_by_any(is_new=new)) for one, new in sources if one is not None]
    values = [(one.cells[n], one.rows[n].plain()) for one, names in found for n in names]
    for one, names in found:
        one.loaded(names)
    with torch.no_grad():
        for cell, value in values:
            cell.shard.copy_(loaded_state(cell.param, value.full_tensor()))


def before_forward() -> None:
    """The same, before the weights are used; rows that the script dropped may go."""
    settle()
    for _, kept in _LAST.values():
        kept.clear()


def before_step(optimizer: Optimizer) -> None:
    """The same, before a step."""
    before_forward()
    _STEPS[optimizer] = _STEPS.get(optimizer, 0) + 1


def follow_weights(
    module: nn.Module, mesh: Any, cells: Mapping[str, Cell], values: dict[str, Any]
) -> dict[str, Any]:
    """Rows of weights that follow. Values that are no DTensors are returned as they are."""
    ref = weakref.ref(module)

    def count() -> Any:
        module = ref()
        engine = None if module is None else record_of(module).engine_ref()
        home = None if engine is None else engine.home  # `p.data.mul_` counts here, too
        return None if module is None else (id(home), getattr(home, "num_writes", 0))

    def gather(shards: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        module = ref()
        assert module is not None
        return whole_params(engine_for(module), shards)

    return _follow(module, _Source(mesh, count, gather), cells, values)


def follow_states(
    optimizer: Optimizer, cells: Mapping[str, Cell], values: dict[str, Any]
) -> dict[str, Any]:
    """Rows of an optimizer's states that follow."""
    ref = weakref.ref(optimizer)

    def count() -> Any:
        optimizer = ref()
        return None if optimizer is None else _STEPS.get(optimizer, 0)

    def gather(shards: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, shard.full_tensor()) for name, shard in shards.items())

    return _follow(optimizer, _Source(None, count, gather), cells, values)


def _follow(
    owner: Any, new: _Source, cells: Mapping[str, Cell], values: dict[str, Any]
) -> dict[str, Any]:
    """Takes the rows of the last state dict while it is kept, as torch's share memory."""
    last = _LAST[owner][0]() if owner in _LAST else None
    source = last if last is not None and last.mesh is new.mesh and last.fits(cells) else new
    values = source.take(cells, values)
    _LAST[owner] = weakref.ref(source), list(source.rows.values())
    return values


def unfollowed(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """A state dict to load, of rows as they are before the first weight changes. A collective."""
    settle()
    return {key: v.plain() if isinstance(v, FollowingRows) else v for key, v in state.items()}
