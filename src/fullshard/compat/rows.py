"""DTensors of each rank's rows, which state dicts of FSDP2's facade contain.

torch's share the memory of weights and of optimizer states, and scripts rely on it: they save a
state dict that was taken long ago, or read a checkpoint into one and drop it. Ours are copies that
follow: reading them gathers new values, and what was written is loaded before the next use of a
shard by all ranks.

A rank may write alone, or drop its rows earlier. All ranks therefore have the same list of sources
per model (`GradientNorms.rows`), and compare it with one small sum before each use: which rows were
written, which weights changed, and which memory is still used by a script. A source that no rank
uses is dropped. Without sources nothing is compared.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_leaves

from fullshard.compat import MisuseError
from fullshard.compat.wrapping import topology
from fullshard.engine._torch_compat import storage_use_count
from fullshard.engine.engine import Engine
from fullshard.engine.norms import by_model, from_host
from fullshard.engine.optimizers import loaded_state
from fullshard.engine.parameter import ShardedGradient, ShardedParameter, params_of, shards_in
from fullshard.planner.layout import clean_name
from fullshard.planner.mesh import Mesh


def rows_of(engine: Engine, whole: torch.Tensor, mesh: Any = None) -> DTensor:
    """Returns this rank's rows of a full tensor as a DTensor; 0-dim tensors are replicated."""
    mesh = mesh if mesh is not None else device_mesh(engine.plan.mesh, engine.device.type)
    return own_rows(whole, mesh, engine.plan.mesh, engine.rank)


@torch.inference_mode(mode=False)  # rows count their versions
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
    """Rows that follow a weight or a state; all state dicts share the memory of its rows.

    The first read after a change gathers all rows of the model: a collective.
    """

    follows: FollowedShard | None = None  # None: a copy of torch's stager

    @property
    def _local_tensor(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self.follows is not None:
            self.follows.update()
        return _LOCAL.__get__(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").partition(".")[0]
        counts = not (name.startswith(LIST_FUNCTIONS) and name.endswith("_"))  # versions
        operands = args[:1] if name.startswith("_foreach_") and not counts else (args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            rows = [x for x in tree_leaves(operands) if isinstance(x, FollowingRows)]
            before = [row._version for row in rows]
            result = func(*args, **(kwargs or {}))
            for row, version in zip(rows, before, strict=True):
                if not counts or row._version != version:  # at these rows, but all share the memory
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
LIST_FUNCTIONS = ("_foreach_", "_fused_", "_amp_")


class FollowedShard:
    """A shard that rows of a state dict follow.

    Attributes:
        shard: A weight, or a state of an optimizer.
        param: The weight of which it is a state, or itself.
        like: The rows in torch's class. All rows of the shard share their memory.
        seen: State of the shard, and version of the memory, when both were last equal.
        thread: The thread that last used the model.
    """

    def __init__(self, shard: Any, param: Any, engine: Engine, like: DTensor) -> None:
        self.shard, self.param, self.like = shard, param, like
        self.mesh, self.rank = engine.plan.mesh, engine.rank
        self._memory = _LOCAL.__get__(like).untyped_storage()
        self._num_own = storage_use_count(self._memory._cdata)
        _SOURCES.add(self)

    def __deepcopy__(self, memo: Any) -> None:
        """Nothing, for torch's stager, which copies the attributes of rows."""

    @property
    def norms(self) -> Any:
        """The norms of its model, by which ranks compare values."""
        return self.param.record.norms

    def _now(self) -> Any:
        record = self.param.record
        num_writes = record.home.num_writes if self.shard is self.param else 0  # `p.data.mul_`, too
        return record, record.last_write, num_writes, self.shard._version

    @torch.inference_mode(mode=False)
    def rows(self) -> FollowingRows:
        """New rows that share the memory."""
        row: Any = FollowingRows.plain(self.like)  # pyright: ignore[reportArgumentType]
        row.__class__, row.follows = FollowingRows, self
        return row

    def take(self, rows: DTensor) -> None:
        """Copies rows of the shard as it is now."""
        self.like._local_tensor.copy_(rows._local_tensor)
        self.see(self.like._local_tensor._version)

    def see(self, version: int) -> None:
        """Takes the shard as equal to this version of the rows."""
        self.seen, self.thread = (self._now(), version), threading.get_ident()

    def flags(self) -> tuple[bool, bool, bool]:
        """Whether the rows were written, whether the shard was, and whether a script has rows."""
        is_used = storage_use_count(self._memory._cdata) > self._num_own
        if not self.is_sharded:  # loaded afterwards
            return False, self.is_changed(), True
        return self.is_written(), self.is_changed(), is_used

    @property
    def is_sharded(self) -> bool:
        """Whether the weight is not inside `unshard`."""
        return isinstance(self.param, ShardedParameter)

    def is_changed(self) -> bool:
        """Whether the shard may have other values than the rows."""
        return self._now() != self.seen[0]

    def is_written(self) -> bool:
        """Whether rows were written on this rank and not loaded."""
        return self.like._local_tensor._version != self.seen[1]

    def whole(self) -> torch.Tensor:
        """The full tensor; inside `unshard`, without what was written there. A collective."""
        is_shown = self.shard is self.param and not self.is_sharded
        return self.param.record.gather(None) if is_shown else self.shard.full_tensor()

    def load(self) -> None:
        """Writes rows of all ranks into the shard. A collective."""
        version = self.like._local_tensor._version  # another thread may go on writing
        self.shard.copy_(loaded_state(self.param, self.like.full_tensor()))
        self.see(version)

    def misuse(self, expected: str) -> MisuseError:
        """The error of a use that cannot be right."""
        return MisuseError(f"{clean_name(self.param.record.piece.name)}: expected {expected}")

    def update(self) -> None:
        """Gathers the rows of the model if its shards have changed."""
        if self.norms.rows.get(id(self.shard)) is not self or not self.is_changed():
            return  # or it is a tensor before `model.half()`
        if self.is_written() and not self.is_sharded:  # inside `unshard`, where nothing is loaded
            raise self.misuse(_LOADED.format("the weights changed"))
        if self.thread != threading.get_ident():
            raise self.misuse(
                "rows of a state dict that are up to date, in a thread other than the one that "
                "trains; the weights changed since, and a gather would meet those of the other "
                "thread. Call state_dict() or read the rows there, and give this thread copies."
            )
        _sync(self.norms, reads=True)


_SOURCES: WeakSet[FollowedShard] = WeakSet()
_BUSY: list[int] = []  # while rows are loaded
_LOADED = (
    "load_state_dict() of a state dict that was written, since its tensors are copies here; it was "
    "not called before {}. Call load_state_dict(state_dict) after reading a checkpoint into it."
)


def _sync(norms: Any, *, reads: bool = False) -> None:
    """Loads rows that any rank wrote; gathers rows of changed shards for reads. A collective."""
    sources = [*norms.rows.values()]
    own = from_host([float(flag) for one in sources for flag in one.flags()], norms.device)
    what = "a read of a state dict that was kept" if reads else "state dicts that were written"
    sums = norms.all_reduce(own, what).view(-1, 3).tolist()
    norms.finish_checks()
    both = list(zip(sources, sums, strict=True))
    for one, (is_written, is_changed, _) in both:
        if is_written and is_changed:
            raise one.misuse(_LOADED.format("the weights changed"))
    with inside(_BUSY), torch.no_grad():
        for one, (is_written, _, _) in both:
            if is_written:
                one.load()
        for one, (_, is_changed, num_used) in both:
            if not num_used:
                del norms.rows[id(one.shard)]
            elif is_changed and reads:
                one.take(own_rows(one.whole(), one.like.device_mesh, one.mesh, one.rank))
            elif not is_changed:
                one.see(one.seen[1])


@contextmanager
def inside(calls: list[int]) -> Generator[None]:
    """Counts a call while the context is open."""
    calls.append(1)
    try:
        yield
    finally:
        calls.pop()


def settle(values: Iterable[Any]) -> None:
    """Loads rows that were written, of the models of these shards.

    A collective if scripts have rows of these models; its ranks compare that all ask.
    """
    if _SOURCES and not _BUSY:
        for norms in by_model(shards_in(values)):
            if norms.rows:
                _sync(norms)


def before_change(engine: Engine) -> None:
    """The same, before a forward or a new engine."""
    settle(member.param for member in engine.members)


def before_step(optimizer: Any) -> None:
    """The same, before a step of an optimizer."""
    settle(param for group in optimizer.param_groups for param in group["params"])


def before_read(values: Any, name: str | None) -> None:
    """The same, before shards are read; a function that a rank may call alone is refused."""
    if not _SOURCES or _BUSY:
        return
    shards = [x for x in shards_in(values) if not isinstance(x, ShardedGradient)]
    for shard in chain(shards, *map(params_of, shards)) if name is not None else ():
        one = shard.record.norms.rows.get(id(shard))
        if one is not None and one.is_written():
            if topology().world_size > 1:
                raise one.misuse(_LOADED.format(f"{name} of this rank's part"))
            name = None
    if name is None:
        settle(shards)


def follow(engine: Engine, shard: Any, param: Any, value: DTensor) -> DTensor:
    """Rows that follow a shard and share the memory of those that the script has."""
    known = engine.norms.rows
    one = known.get(id(shard))
    if one is None or (one.like.dtype, one.like.placements) != (value.dtype, value.placements):
        one = known[id(shard)] = FollowedShard(shard, param, engine, value)
    one.take(value)
    return one.rows()


def shard_of(value: Any) -> Any:
    """The shard that rows follow; another value itself."""
    source = value.follows if isinstance(value, FollowingRows) else None
    return value if source is None else source.shard


def unfollowed(state: Mapping[Any, Any], params: Iterable[Any]) -> dict[Any, Any]:
    """A state dict to load, of rows as they are before the first weight changes. A collective.

    Args:
        state: Rows and other values.
        params: The weights that it is loaded into, or those whose states it is loaded into.
    """
    settle([*params, *(shard_of(value) for value in state.values())])
    return {key: v.plain() if isinstance(v, FollowingRows) else v for key, v in state.items()}
