"""Refusing optimizers that would be wrong on shards.

[Note: the probe]
An optimizer is correct on shards if it is elementwise. Its class does not show this, so it is
tried: three steps on a tensor and on two flat shards of it give the same values exactly when
elements do not mix and shapes do not matter. A second tensor exceeds the sizes from which some
optimizers change their method; its first shard does not. Each class is tried at its first step,
once for each structure of its settings (which are on, off, zero or None). A schedule that only
changes numbers causes no further probe.

[Note: states that were made whole]
Some optimizers make their states when they are built (Adagrad), and a state dict may come from an
unsharded run. States of a parameter's global shape are cut at the next step, like the parameter.
States that are shards stay as they are. For a parameter of one element a state and a count have the
same shape; the probe has recorded which states have one element per element of the parameter.
"""

from __future__ import annotations

import inspect
import logging
import math
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from operator import is_, methodcaller
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook as after_steps
from torch.optim.optimizer import register_optimizer_step_pre_hook as before_steps

from fullshard.engine._torch_compat import (
    before_state_dicts,
    no_guard,
    register_guard_types,
    tree_leaves,
)
from fullshard.engine.computed import Computed
from fullshard.engine.disk import Disk, put_back, step_in_turns
from fullshard.engine.norms import Count, GradientNorms, by_model, hash_of
from fullshard.engine.parameter import (
    Guarded,
    PendingGradient,
    PlacedParameter,
    ShardedGradient,
    ShardedParameter,
    ShardedTensor,
)
from fullshard.errors import EngineError, NotElementwiseError

logger = logging.getLogger(__name__)

# Shapes and sizes of the first shard, which ends within a vector of a kernel.
PROBES = (((6, 4), 10), ((130, 64), 300))
_CHANGED = 64  # more than the number of states of a parameter
TURN_SHAPES = ((6, 4), (5, 3), (4, 4))
PROBE_STEPS = 3
PROBE_RATE = 1e-2  # and not the group's own, which a warm-up begins at zero


class _Watch:
    """The engine's process-wide hooks before and after steps of optimizers on shards.

    It is registered with the first model that has shards and removed with the last.

    Attributes:
        trusted: Optimizers that are right on shards without a probe; their states may be whole.
        callbacks: Called with an optimizer at its first step on shards, and before each state dict.
        before_step: Called with an optimizer before each step.
    """

    def __init__(self) -> None:
        self._owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._handles: list[Any] = []
        self._stepping: weakref.WeakSet[Any] = weakref.WeakSet()  # models of a running step
        self._undo: list[Callable[[], None]] = []  # for the last owner's end
        self._passed: set[Any] = set()
        self._in_turns: dict[Any, bool] = {}  # whether settings are elementwise
        self._kept: list[tuple[Any, Any]] = []  # gradients that an update in turns has used
        self._sliced: dict[type, set[str]] = {}  # states with an element for each of a parameter's
        self._cut: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._looked_at: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.trusted: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.callbacks: list[Callable[[Optimizer], None]] = []
        self.before_step: list[Callable[[Optimizer], None]] = []

    def add(self, owner: object) -> None:
        """Watch as long as an owner of shards lives: an engine, or a model without one yet."""
        if owner in self._owners:
            return
        for optimizer in self._looked_at:
            _groups_of(optimizer).clear()  # parameters that were sharded again have new records
        self._owners.add(owner)
        weakref.finalize(owner, self._release).atexit = False
        if not self._handles:
            self._handles = [before_steps(self._before_step), after_steps(self._after_step)]
            guards = (ShardedParameter, PlacedParameter, ShardedGradient, ShardedTensor)
            self._undo = [register_guard_types(*guards), before_state_dicts(self._tell)]

    @property
    def has_owners(self) -> bool:
        """Whether an owner of shards lives, or waits to be collected."""
        return next(iter(self._owners), None) is not None

    def _release(self) -> None:
        if not self.has_owners:
            while self._handles:
                self._handles.pop().remove()
            while self._undo:
                self._undo.pop()()
            self._passed.clear()

    def _tell(self, optimizer: Optimizer) -> None:
        for call in self.callbacks:
            call(optimizer)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        put_back(self._kept)  # of a step that raised
        for call in self.before_step:
            call(optimizer)
        models = self.look(optimizer)
        if any(norms.waits for norms in models):
            _refuse_pending(optimizer)
        for norms, settings in models.items():
            norms.counts.update({Count.STEPS: 1, **settings})
        disk = next((norms.disk for norms in models if norms.disk is not None), None)
        if disk is not None and not args[1:] and not kwargs and self._takes_turns(optimizer):
            self._kept = step_in_turns(optimizer, disk)
        self._stepping = weakref.WeakSet(models)  # last: trials of optimizers end steps, too

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        for group in [] if optimizer in self.trusted else _groups_of(optimizer):
            for part in group.parts.values():
                part.note(optimizer.state)
        for norms in self._stepping:
            norms.wrote.clear()
            norms.copied.clear()
        put_back(self._kept)

    def _takes_turns(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer of torch may be called for some elements after others."""
        kind: Any = type(optimizer)
        if not kind.step.__module__.startswith("torch.optim.") or optimizer in self.trusted:
            return False
        if getattr(optimizer, "grad_scale", None) is not None:  # its step writes gradients
            return False
        hooks: Any = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
        if any(hooks) or any(len(handle.hooks_dict_ref()) > 1 for handle in self._handles):
            return False  # others' hooks may use gradients
        for group in optimizer.param_groups:
            settings = settings_in(group)
            key = (kind, *((k, _structure(v)) for k, v in settings.items()))
            if key not in self._in_turns:
                self._in_turns[key] = _is_the_same_in_turns(partial(_like, kind, settings))
            if not self._in_turns[key]:
                return False
        return True

    def look(self, optimizer: Optimizer) -> dict[Any, Counter[str]]:
        """Check an optimizer while its groups have all shards.

        Returns:
            The models they are of, and hashes of the settings of each.
        """
        models: dict[Any, Counter[str]] = defaultdict(Counter)
        trusted = optimizer in self.trusted
        states = {} if trusted else optimizer.state  # owners have their own
        groups, new = _groups_of(optimizer), list[Any]()
        is_known = bool(groups)  # a model that is sharded again clears them
        self._looked_at.add(optimizer)
        for at, group in enumerate(optimizer.param_groups):
            if at == len(groups) or not groups[at].has(group["params"]):
                groups[at : at + 1] = [_Group(optimizer, group["params"])]
                new += group["params"]
            for norms, part in groups[at].parts.items():
                models[norms].update(part.hashes(settings_in(group), states))
            first = groups[at].first
            if first is not None and not trusted:
                self._probe_once(optimizer, group, first)
        del groups[len(optimizer.param_groups) :]
        is_first = optimizer not in self._cut and not trusted
        if is_first or (is_known and new):
            _tell_of_others(optimizer, new, models)
        if is_first:
            self._cut.add(optimizer)
            self._cut_states(optimizer)
            optimizer.register_load_state_dict_post_hook(self._cut_states)
            self._tell(optimizer)
        return models

    def _cut_states(self, optimizer: Optimizer) -> None:
        """Cut states of whole parameters. See [Note: states that were made whole]."""
        sliced = self._sliced.get(type(optimizer), set())
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            states = optimizer.state.get(param, {})
            if isinstance(param, ShardedParameter) and param.record.is_cut:
                for key, value in states.items():
                    if isinstance(value, torch.Tensor) and not isinstance(value, Guarded):
                        states[key] = cut_state(param, value, sliced=key in sliced)

    def states(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Each parameter and its states, of all optimizers that have stepped on shards."""
        for optimizer in self._cut:
            yield from optimizer.state.items()

    def _probe_once(self, optimizer: Optimizer, group: dict[str, Any], like: torch.Tensor) -> None:
        kind, settings = type(optimizer), settings_in(group)
        numbers = {k: v for k, v in settings.items() if k not in ("lr", "initial_lr")}
        dtype, kinds = like.dtype, ((k, _structure(v)) for k, v in numbers.items())
        key = (kind, like.device.type, dtype, *kinds)
        if key not in self._passed and not _steps_others(optimizer):
            rate = {"lr": PROBE_RATE} if settings.get("lr") is not None else {}
            like = torch.empty(0, dtype=dtype, device=like.device)
            self._sliced.setdefault(kind, set()).update(probe(kind, {**settings, **rate}, like))
            self._passed.add(key)


def _is_the_same_in_turns(make: Callable[[list[Any]], Optimizer]) -> bool:
    """Whether updates of a few elements after others equal an update of all."""
    drawn, memory = _drawn(TURN_SHAPES, torch.empty(0)), Disk("")

    def in_turns(optimizer: Optimizer) -> None:
        put_back(step_in_turns(optimizer, memory, num_bytes=1, grain=8))

    try:
        together, _ = _stepped(make, drawn)
        found, _ = _stepped(make, drawn, step=in_turns)
    except Exception:  # noqa: BLE001  it is called once for all of them
        return False
    return all(map(partial(torch.allclose, rtol=1e-6, atol=1e-8), together, found))


class _Groups(list["_Group"]):
    """An optimizer's groups as they were at its last step; a copy of it has none."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _Groups, ()


def _groups_of(optimizer: Optimizer) -> _Groups:
    """They live in the optimizer, to which hooks on their parameters may refer."""
    return vars(optimizer).setdefault("_fullshard_groups", _Groups())


class _Group:
    """A group's parameters, which are looked at again when others are there or one is whole.

    Attributes:
        parts: Its shards by model.
        first: A shard that is cut; None if there is none.
    """

    def __init__(self, optimizer: Optimizer, params: Sequence[Any]) -> None:
        _refuse_unsharded(optimizer, params)
        self._params = [*params]
        self._kinds = list(map(type, params))
        shards = [param for param in params if isinstance(param, ShardedParameter)]
        self.parts = {norms: OptimizerPart(ours, norms) for norms, ours in by_model(shards).items()}
        self.first = next((param for param in shards if param.record.is_cut), None)

    def has(self, params: Sequence[Any]) -> bool:
        """Whether these are its parameters, and none has become whole or a shard."""
        own, kinds = self._params, self._kinds
        return len(params) == len(own) and all(map(is_, params, own)) and [*map(type, own)] == kinds


class OptimizerPart:
    """A model's shards in a group, whose settings and states ranks compare.

    A rank may leave out shards without elements (`if p.numel()`), and with them the group. Settings
    of groups are therefore compared over all ranks only if all list the same shards. The ranks with
    elements of a parameter compare its settings, the number of its states, and whether these
    changed since the last step. Counts in states are compared for a parameter of which all ranks
    have elements.
    """

    def __init__(self, shards: Sequence[Any], norms: GradientNorms) -> None:
        self._listed = self._shared = 0  # sums of a number for each shard
        self.weights: list[tuple[Any, int]] = []  # of those whose elements several ranks have
        self.seen: list[Any] = []  # versions of their states after the last step
        self._whole: Any = None
        if norms.transport is None:  # of compat, before their engine
            return
        world = norms.transport.axes.mesh.world_size
        for param, one in ((param, param.record) for param in shards):
            number, size = hash((one.index, 0)), len(one.holders)  # equal in all processes
            self._listed += number
            if one.cut is not None:
                continue
            if self._whole is None and one.copies * size == world:
                self._whole = param
            if size > 1 and one.piece.numel:
                weight = -1 if one.piece.start else size - 1  # 0 for all holders together
                self._shared += weight * number
                self.weights.append((param, weight * hash((one.index, 1))))

    def hashes(self, settings: dict[str, Any], states: Any) -> dict[str, int]:
        """Returns the numbers that are added to the compared counts at each step."""
        own, both = hash_of(settings), 0
        if self._whole is not None:
            state = states.get(self._whole, {})  # a tensor of (1,) may be a state of one element
            counts = [x for x in state.values() if not (isinstance(x, torch.Tensor) and x.dim())]
            both = hash_of([settings, len(state), counts])
        numbers, now = 0, self.versions(states)
        for (param, weight), seen, one in zip(self.weights, self.seen or now, now, strict=True):
            numbers += weight * (len(states.get(param, ())) + _CHANGED * differ(seen, one))
        return {
            Count.LISTED: self._listed,
            Count.GROUPS: own * self._listed,
            Count.SETTINGS: both,
            Count.STATES: own * self._shared + numbers,
        }

    def note(self, states: Any) -> None:
        """Note the states after a step, to find those that change before the next one."""
        self.seen = self.versions(states)

    def versions(self, states: Any) -> list[Any]:
        found = [states.get(param, {}).values() for param, _ in self.weights]
        with no_guard():
            tensors = [[x for x in one if isinstance(x, torch.Tensor)] for one in found]
            return [
                [(weakref.ref(x), x.is_inference() or x._version) for x in one] for one in tensors
            ]


def differ(seen: Sequence[Any], now: Sequence[Any]) -> bool:
    """Whether tensors are others or were written. The id of a freed tensor returns."""
    pairs = zip(seen, now, strict=False)
    return len(seen) != len(now) or any(a is not b or v != w for (a, v), (b, w) in pairs)


def _tell_of_others(
    optimizer: Optimizer, params: Iterable[Any], models: Iterable[GradientNorms]
) -> None:
    """Warn of trained parameters that are no shards, so each rank would update its own copy."""
    others = [p for p in params if p.requires_grad and not isinstance(p, Guarded)]
    transports = [norms.transport for norms in models if norms.transport is not None]
    if others and any(one.axes.mesh.world_size > 1 and one.rank == 0 for one in transports):
        logger.warning(
            "%s: %d of its parameters (the first of shape %s) are not sharded, so their gradients "
            "are not summed over ranks. Register their modules in the model before fs.shard, shard "
            "them too, or sum p.grad over the ranks before each step.",
            *(type(optimizer).__name__, len(others), tuple(others[0].shape)),
        )


def _steps_others(optimizer: Optimizer) -> bool:
    """Whether optimizers that it contains have all of its parameters, as in torchtitan.

    Each of them is tried at its own step. The guard checks what the outer one does itself.
    """
    inner = [x for x in tree_leaves(vars(optimizer)) if isinstance(x, Optimizer)]
    ids = {id(p) for one in inner for group in one.param_groups for p in group["params"]}
    return all(id(p) in ids for group in optimizer.param_groups for p in group["params"])


def _refuse_pending(optimizer: Optimizer) -> None:
    with no_guard():
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
    pending = [grad for grad in grads if isinstance(grad, PendingGradient)]
    if pending:
        raise pending[0].refusal(f"{type(optimizer).__name__}.step")


def _structure(value: Any) -> Any:
    """The structure of a setting; of a number, whether it is zero. A new one is probed again."""
    if isinstance(value, list | tuple):
        return tuple(map(_structure, value))
    if value is None or isinstance(value, bool | str):
        return value
    return value != 0 if isinstance(value, int | float) else type(value)


WATCHED = _Watch()


def _refuse_unsharded(optimizer: Optimizer, params: Sequence[Any]) -> None:
    """Raise an error inside fs.unsharded, where parameters are whole but keep their records."""
    for param in params:
        record = getattr(param, "record", None)
        if isinstance(param, Computed):
            raise EngineError(
                f"{type(optimizer).__name__}: expected the model's parameters; got a compute "
                "parameter of its forward. After a KeyboardInterrupt inside a forward, call "
                "fs.reset(model) before model.parameters()."
            )
        if record is not None and not isinstance(param, Guarded):
            raise EngineError(
                f"{type(optimizer).__name__}.step inside fs.unsharded: expected shards; got the "
                f"whole {record.piece.name!r}, with states of its shard. Step outside of the block."
            )


def cut_state(param: ShardedParameter, value: torch.Tensor, *, sliced: bool) -> torch.Tensor:
    """A plain state as this rank has it; every rank decides alike.

    Args:
        param: The parameter that the state belongs to.
        value: The state: whole, of this rank's elements already, or of other elements.
        sliced: Whether such states are known to have an element for each of the parameter's.
    """
    shape = param.record.shape
    if not sliced and math.prod(shape) == 1:
        return value
    if tuple(value.shape) == shape:
        value = value.full_tensor() if hasattr(value, "full_tensor") else value  # type: ignore
        return param.as_state(param.record.local_of(value).clone())
    return param.as_state(value) if value.shape == param.shape else value


def loaded_state(param: Any, value: torch.Tensor) -> torch.Tensor:
    """A copy of a state that was loaded, as this rank has it."""
    place = param.device if value.dim() else "cpu"  # torch keeps step counts on the CPU
    value = value.detach().to(place, copy=True)
    is_shard = isinstance(param, ShardedParameter)
    return cut_state(param, value, sliced=value.dim() > 0) if is_shard else value


def probe(kind: type[Optimizer], settings: dict[str, Any], like: torch.Tensor) -> set[str]:
    """Step on a tensor and on shards of it; returns the states that have its elements.

    Parameters of 16 bits are tried in float32 too, because their rounding hides differences.

    Args:
        kind: Class of the optimizer.
        settings: Settings of one parameter group.
        like: A tensor with the parameters' device and dtype: some optimizers step on certain
            devices or dtypes only.

    Raises:
        NotElementwiseError: The results differ, or the class cannot be tried.
    """
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise NotElementwiseError(
            f"{kind.__name__}: expected an elementwise optimizer; this one runs the model within "
            "its step (closure) and moves all elements in one direction. Use AdamW or another "
            "elementwise optimizer, or strategy no_shard."
        )
    dtypes = dict.fromkeys((torch.promote_types(like.dtype, torch.float32), like.dtype))
    states: Iterable[tuple[str, Any]] = ()
    for dtype, (shape, size) in product(dtypes, PROBES):
        drawn = _drawn([shape], like.to(dtype))
        cut = [list(tensor.view(-1, 1).tensor_split((size,))) for (tensor,) in drawn]
        try:
            make = partial(_like, kind, settings)
            (whole,), optimizer = _stepped(make, drawn)
            shards, _ = _stepped(make, cut)
            states = optimizer.state[optimizer.param_groups[0]["params"][0]].items()
        except Exception as error:
            if dtype != like.dtype:
                continue  # it takes 16 bits only
            raise NotElementwiseError(
                f"{kind.__name__}: expected an optimizer that can be tried on a small tensor, to "
                f"test whether it works on shards; it raised {type(error).__name__}: {error}. Use "
                "an elementwise optimizer of torch.optim, or strategy no_shard."
            ) from error
        rounding = (64 if dtype.itemsize > 2 else 8) * torch.finfo(dtype).eps
        together, apart = whole.view(-1, 1), torch.cat(shards)
        if not torch.allclose(together, apart, rounding, rounding / 64, equal_nan=True):
            use = "Leave out fused=True, or use" if settings.get("fused") else "Use"
            raise NotElementwiseError(
                f"{kind.__name__}: expected an elementwise optimizer; three steps on a tensor and "
                f"on two shards of it differ. {use} an elementwise one (AdamW, SGD, Adagrad, "
                f"RMSprop, Lion ...), or strategy no_shard. fs.owned(model, {kind.__name__}) gives "
                "each whole tensor to one rank."
            )
    return {k for k, x in states if isinstance(x, torch.Tensor) and x.shape == PROBES[-1][0]}


def _like(
    kind: type[Optimizer], settings: dict[str, Any], params: list[torch.nn.Parameter]
) -> Optimizer:
    """An optimizer of a class, with the settings of a group."""
    known = inspect.signature(kind.__init__).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    one = [k for k, v in settings.items() if isinstance(v, torch.Tensor) and v.numel() == 1]
    settings = {**settings, **{k: settings[k].item() for k in one}}
    taken = {k: v for k, v in settings.items() if takes_any or k in known}
    return kind([{"params": params, **settings}], **taken)


def states_made(
    optimizer: Optimizer, group: dict[str, Any], given: dict[str, Any], small: torch.Tensor
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The states that an optimizer would make for a parameter, before and after its first step.

    Args:
        optimizer: Is left as it is; a small one of its class steps.
        group: The parameter's group in it.
        given: Settings of another optimizer's group, which override the group's.
        small: A tensor with the dtype, device and number of dimensions of the parameter.

    Returns:
        None if the class cannot be tried.

    Raises:
        KeyError: `given` lacks a setting of the class.
    """
    like = torch.nn.Parameter(small)
    try:
        made = _like(type(optimizer), settings_in(group), [like])
        fresh = made.state_dict()
        made.load_state_dict({**fresh, "param_groups": [{**settings_in(given), "params": [0]}]})
        like.grad = torch.zeros_like(like)
        made.step()
    except KeyError:
        raise
    except Exception:  # noqa: BLE001  its own error, at its next step
        return None
    return fresh["state"].get(0, {}), made.state_dict()["state"].get(0, {})


def settings_in(group: dict[str, Any]) -> dict[str, Any]:
    """Everything in a group but its parameters."""
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def check_by_itself(
    factory: Callable[[list[dict[str, Any]]], Optimizer],
    groups: list[dict[str, Any]],
    like: torch.Tensor,
) -> None:
    """Whether an optimizer may have some of the tensors, and update them in turns.

    Args:
        factory: Makes the optimizer.
        groups: Parameter groups whose settings are tried.
        like: A tensor of the dtype and on the device that it will see.

    Raises:
        EngineError: Together, in turns and apart the same tensors are updated otherwise.
    """
    drawn = [[0.01 * tensor for tensor in tensors] for tensors in _drawn(TURN_SHAPES, like)]
    for group in groups:
        try:
            make = partial(_made_by, factory, settings_in(group))
            together, _ = _stepped(make, drawn)
            first, _ = _stepped(make, [x[:2] for x in drawn], [[0], [1]], seen_later=True)
            second, _ = _stepped(make, [x[2:] for x in drawn], seen_later=True)
        except Exception as error:
            raise EngineError(
                "fs.owned: expected an optimizer that can be tried on small matrices of "
                f"{like.dtype}; it raised {type(error).__name__}: {error}. Use it under no_shard, "
                "without fs.owned."
            ) from error
        close = partial(torch.allclose, rtol=1e-6, atol=1e-10)
        if not all(map(close, together, [*first, *second])):
            raise EngineError(
                "fs.owned: expected an optimizer that updates each tensor independently; its "
                "update depends on other tensors, on the order of updates or on the values at its "
                "creation. Use it under no_shard, without fs.owned."
            )


def _drawn(shapes: Sequence[tuple[int, ...]], like: torch.Tensor) -> list[list[torch.Tensor]]:
    """Random values of tensors with these shapes, then gradients of each step."""
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    return [[draw(shape).to(like) for shape in shapes] for _ in range(1 + PROBE_STEPS)]


def _made_by(
    factory: Callable[[list[dict[str, Any]]], Optimizer],
    settings: dict[str, Any],
    params: list[torch.nn.Parameter],
) -> Optimizer:
    """An optimizer of a factory, with the settings of a group and the probe's rate."""
    optimizer = factory([{**settings, "params": params}])
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), int | float):
            group["lr"] = PROBE_RATE
    return optimizer


def _stepped(
    make: Callable[[list[torch.nn.Parameter]], Optimizer],
    drawn: list[list[torch.Tensor]],
    turns: Sequence[Sequence[int]] | None = None,
    *,
    seen_later: bool = False,
    step: Callable[[Any], object] = methodcaller("step"),
) -> tuple[list[torch.Tensor], Optimizer]:
    """The values of parameters after some steps, and the optimizer.

    Args:
        make: Makes the optimizer.
        drawn: Values, then gradients of each step.
        turns: Which parameters have gradients in each call of a step; None: one call with all.
        seen_later: Whether values are there only after it was made.
        step: Steps the optimizer.
    """
    params = [torch.nn.Parameter(tensor * (not seen_later)) for tensor in drawn[0]]
    getattr(optimizer := make(params), "train", list)()  # schedule-free ones refuse to step before
    for param, tensor in zip(params, drawn[0], strict=True):
        param.data = tensor.clone()
    for gradients in drawn[1:]:
        for turn in turns or [range(len(params))]:
            for index, param in enumerate(params):
                param.grad = gradients[index].clone() if index in turn else None
            step(optimizer)
    return [param.detach() for param in params], optimizer
