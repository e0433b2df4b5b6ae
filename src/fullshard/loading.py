"""fs.load: each rank reads its ranges, independent of the slices in the files.

the newest complete checkpoint ---> is it damaged? (each rank checks a share of the files)
Checkpoint ---> LocalPart ---> model, optimizer          checked completely before the first write
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fullshard.checkpoint.format import ADAPTED, AVERAGE, OWN, Kind, StoredTensor, key_of
from fullshard.checkpoint.read import Checkpoint, choose
from fullshard.checkpoint.retain import Found, candidates
from fullshard.config.values import nearest
from fullshard.engine._torch_compat import has_version, storage_key
from fullshard.engine.cuts import Cut
from fullshard.engine.engine import Engine, engine_of
from fullshard.engine.hugging_face import some
from fullshard.engine.owned import owns_states
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.state import (
    DTYPES,
    LocalPart,
    OptimizerState,
    as_bytes,
    kind_of,
    matching_settings,
    model_tensors,
    optimizer_state,
    restore_optimizer,
)
from fullshard.errors import CheckpointError, untrusted
from fullshard.planner.layout import clean_name
from fullshard.saving import (
    EXTRA,
    GROUPS,
    RANDOM,
    SAVES,
    SCALARS,
    batches_of,
    ranks_of,
    set_random_state,
)

logger = logging.getLogger(__name__)


def load(path: Path, model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """Loads a checkpoint into a model and an optimizer. A collective.

    Returns:
        "step" and the values that the caller of `save` passed.

    Raises:
        CheckpointError: No checkpoint is complete and undamaged, or it is of another model; the
            error names tensors.
    """
    engine = engine_of(model)
    engine.agree(SAVES.wait)
    return load_found(choose(ranks_of(engine), path), model, optimizer)


def is_checkpoint(path: str | PathLike[str]) -> bool:
    """Whether `load` would find a complete checkpoint."""
    try:
        return any(found.manifest is not None for found in candidates(Path(path)))
    except CheckpointError:
        return False


def load_found(found: Found, model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """As `load`, from a given checkpoint."""
    engine = engine_of(model)

    def load() -> dict[str, Any]:
        with Checkpoint.open(found, checked=True) as checkpoint:
            return load_open(checkpoint, engine, model, optimizer)

    return engine.agree(load)


def check_loads(found: Found, model: nn.Module, kind: str) -> None:
    """Checks that a checkpoint fits a model that is not sharded yet and may be on meta.

    Args:
        found: The checkpoint; its tensors are not read.
        model: The unsharded model.
        kind: Kind of its optimizer, from `kind_of`.

    Raises:
        CheckpointError: It is of another model or optimizer. A damaged checkpoint passes: `load`
            uses an older one.
    """
    seen = {id(v): (n, v) for n, v in reversed(model.state_dict(keep_vars=True).items())}
    tensors = ((name, x) for name, x in seen.values() if isinstance(x, torch.Tensor))
    wanted = [LocalPart((name,), tuple(x.shape), 0, x.numel(), x) for name, x in tensors]
    with ExitStack() as stack:
        try:
            checkpoint = stack.enter_context(Checkpoint.open(found))
        except CheckpointError:
            return
        _keys_of(checkpoint, wanted)
        groups = _check_kind(checkpoint, kind)["groups"]
        with untrusted(f"checkpoint '{checkpoint.path}'", "what fs.save wrote"):
            if isinstance(groups, list):  # else they differ between ranks
                _check_trained(checkpoint, {n for group in groups for n in group["params"]}, model)


def _check_trained(checkpoint: Checkpoint, before: set[str], model: nn.Module) -> None:
    now = {name for name, param in model.named_parameters() if param.requires_grad}
    for other, who in ((before - now, "it"), (now - before, "this run")):
        if other:
            raise CheckpointError(
                "freeze: expected to train the same parameters as the checkpoint "
                f"'{checkpoint.path}', which has the optimizer's states of them; only {who} trains "
                f"{some(sorted(other))}. Set the freeze of its run, or export it and start from "
                "that folder."
            )


def load_open(
    checkpoint: Checkpoint, engine: Engine, model: nn.Module, optimizer: Optimizer | None
) -> dict[str, Any]:
    """As `load`, from an open checkpoint. All ranks call it inside `engine.agree`."""
    with untrusted(f"checkpoint '{checkpoint.path}'", "what fs.save wrote"):
        states, others = _read_tensors(checkpoint, engine, model, optimizer)
        extra = _value(checkpoint, engine, EXTRA, checkpoint.state["extra"])
        others |= {} if extra is _LEFT_OUT else extra
        if others:
            model.load_state_dict(others, strict=False)
        if optimizer is not None and states is not None:
            restore_optimizer(model, optimizer, states)
        saved = checkpoint.state["state"]
        found = {name: _value(checkpoint, engine, name, coded) for name, coded in saved.items()}
        values = {name: value for name, value in found.items() if value is not _LEFT_OUT}
        generators = values.pop(RANDOM, None)
        if optimizer is not None and generators is not None:
            set_random_state(generators)
        return {**values, "step": checkpoint.state["step"]}


def _read_tensors(
    checkpoint: Checkpoint, engine: Engine, model: nn.Module, optimizer: Optimizer | None
) -> tuple[OptimizerState | None, dict[str, Any]]:
    """Fills shards and optimizer states; returns the states, and values that modules load."""
    wanted = model_tensors(model)
    keys = _keys_of(checkpoint, wanted)
    states = None if optimizer is None else _optimizer_of(checkpoint, engine, model, optimizer)
    engine.home.before_write()
    shards = [m.param for m in engine.members if has_version(m.param)]
    torch.autograd.graph.increment_version(shards)  # of older graphs
    others: dict[str, Any] = {}
    for key, part in zip(keys, wanted, strict=True):
        if part.whole:  # the module knows where it belongs
            part = replace(part, local=torch.empty_like(part.local))
            others[part.names[0]] = part.local.view(part.shape)
        read_into(checkpoint, key, part)
    for target in [] if states is None else states.tensors:
        if not target.opaque:  # those were read with their shapes
            read_into(checkpoint, key_of(Kind.OPTIMIZER, "/".join(target.names)), target)
    return states, others


def read_into(checkpoint: Checkpoint, key: str, part: LocalPart) -> None:
    """Fills a tensor; directly from the file if dtype and device allow it."""
    local, dtype = part.local, DTYPES[checkpoint.index.tensors[key].dtype]
    with torch.no_grad():
        if part.cut is not None:
            local.copy_(_read_cut(checkpoint, key, part, part.cut))
        elif local.device.type == "cpu" and local.dtype is dtype and local.is_contiguous():
            checkpoint.read(key, part.start, part.stop, as_bytes(local))
        else:
            aside = torch.empty(part.stop - part.start, dtype=dtype)
            checkpoint.read(key, part.start, part.stop, as_bytes(aside))
            local.copy_(aside)


def _read_cut(checkpoint: Checkpoint, key: str, part: LocalPart, cut: Cut) -> torch.Tensor:
    """(stop - start,) elements of a local tensor that is no range of the whole.

    The rows that contain them are read whole, because reading parts would need a call per row.
    """
    if part.start == part.stop:
        return part.local
    dtype, row = DTYPES[checkpoint.index.tensors[key].dtype], part.shape[1:]
    count, first, last = 0, 0, part.shape[0]
    if all(placement.is_replicate() or placement.dim for placement in cut.placements):
        count = cut.local_of(torch.empty(1, *row)).numel()  # elements here of each row
        first, last = part.start // count, -(-part.stop // count)
    rows = torch.empty(last - first, *row, dtype=dtype)
    checkpoint.read(key, first * math.prod(row), last * math.prod(row), as_bytes(rows))
    return cut.local_of(rows).reshape(-1)[part.start - first * count : part.stop - first * count]


def _keys_of(checkpoint: Checkpoint, wanted: list[LocalPart]) -> list[str]:
    """Keys of the model's tensors in the checkpoint.

    Raises:
        CheckpointError: The checkpoint has other tensors or shapes.
    """
    saved = checkpoint.index.names(Kind.MODEL)
    keys: list[str] = []
    for part in wanted:
        name = part.names[0]
        key = checkpoint.index.find(Kind.MODEL, name)
        if key is None:
            hint = f" Did you mean {close}?" if (close := nearest(name, saved) or "") else ""
            if (ADAPTED in close) != (ADAPTED in name):
                hint = " One of the two has the adapters of lora, the other has none."
            if clean_name(name) in map(clean_name, saved):
                hint = (
                    " Only one of the two has torch.compile(module); module.compile() keeps names."
                )
            raise CheckpointError(
                f"checkpoint '{checkpoint.path}': expected {name} of shape {part.shape}; the "
                f"checkpoint has no such tensor.{hint} Build the model that was saved."
            )
        shape = checkpoint.index.tensors[key].shape
        if shape != part.shape:
            raise CheckpointError(
                f"checkpoint '{checkpoint.path}': expected {name} of shape {part.shape}; got "
                f"{shape}. Build the model that was saved."
            )
        keys.append(key)
    left = [name for name in saved if key_of(Kind.MODEL, name) not in keys]
    if left:
        raise CheckpointError(
            f"checkpoint '{checkpoint.path}': expected only tensors of the model; it also has "
            f"{left[0]}{f' and {len(left) - 1} more' if len(left) > 1 else ''}. Build that model."
        )
    return keys


def _check_kind(checkpoint: Checkpoint, kind: str) -> dict[str, Any]:
    """The saved optimizer; raises if it is of another kind."""
    saved = checkpoint.state.get("optimizer")
    if saved is None or saved["class"] != kind:
        has = "no optimizer's" if saved is None else saved["class"]
        raise CheckpointError(
            f"checkpoint '{checkpoint.path}': expected the states of {kind}; it has {has}. Use "
            "the optimizer that was saved (a run's training.optim), or load the model without it."
        )
    return saved


def _optimizer_of(
    checkpoint: Checkpoint, engine: Engine, model: nn.Module, optimizer: Optimizer
) -> OptimizerState:
    """Tensors for the states of this rank's slices, not yet read; reuses existing memory."""
    kind = kind_of(optimizer)
    saved = _check_kind(checkpoint, kind)
    groups = _value(checkpoint, engine, GROUPS, saved["groups"])
    scalars = _value(checkpoint, engine, SCALARS, saved["scalars"])
    if groups is _LEFT_OUT or scalars is _LEFT_OUT:
        raise CheckpointError(
            f"checkpoint '{checkpoint.path}': expected {checkpoint.index.world_size} ranks on the "
            f"mesh that saved it, because their settings or counts of {kind} differed. Load the "
            "model without the optimizer."
        )
    matching_settings(model, optimizer, groups)
    found = OptimizerState(kind, [], scalars, groups)
    parts = {part.names[0]: part for part in model_tensors(model)}
    params = dict(model.named_parameters())
    before = _fillable(engine, params, optimizer_state(model, optimizer).tensors)
    for name in checkpoint.index.names(Kind.OPTIMIZER):
        param, _, state = name.rpartition("/")
        key = key_of(Kind.OPTIMIZER, name)
        stored = checkpoint.index.tensors[key]
        of = parts[param]
        whole = None if state == AVERAGE else owns_states(optimizer, params[param])
        if whole is not None:
            if whole:
                found.tensors.append(_owned_state(stored, (param, state), params[param].device))
            continue
        if stored.opaque:
            found.tensors.extend(_own_state(checkpoint, engine, key, of))
            continue
        local, dtype, count = before.get((param, state)), DTYPES[stored.dtype], of.stop - of.start
        parent = checkpoint.index.tensors.get(key_of(Kind.MODEL, param))
        if parent is not None and parent.dtype == stored.dtype and state != AVERAGE:
            dtype = params[param].dtype  # states follow their parameter, as in torch
        if local is None or (local.numel(), local.dtype) != (count, dtype):
            local = _new_state(params[param], count, dtype)
        found.tensors.append(replace(of, names=(param, state), local=local, whole=False))
    return found


def _fillable(
    engine: Engine, params: dict[str, nn.Parameter], states: list[LocalPart]
) -> dict[tuple[str, ...], torch.Tensor]:
    """States by name that may be filled in place: an optimizer may keep a gradient as a state."""
    others: list[Any] = [group.master for group in engine.groups]
    others += [group.grads.shown for group in engine.groups if group.grads is not None]
    left_out = [param for param in params.values() if not isinstance(param, ShardedParameter)]
    others += [x for param in left_out for x in (param, param.grad) if x is not None]
    others = [x for x in others if x.layout is torch.strided]
    users = Counter(map(storage_key, [*others, *(state.local for state in states)]))
    return {state.names: state.local for state in states if users[storage_key(state.local)] == 1}


def _owned_state(stored: StoredTensor, names: tuple[str, str], device: torch.device) -> LocalPart:
    """A whole tensor of an owned optimizer, not yet read."""
    local = torch.empty(stored.numel, dtype=DTYPES[stored.dtype], device=device)
    return LocalPart(names, stored.shape, 0, stored.numel, local, whole=True)


def _new_state(param: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    """(count,) uninitialized elements in the home of the parameter's states."""
    if isinstance(param, ShardedParameter):
        return param.new_state(dtype)
    return torch.empty(count, dtype=dtype, device=param.device)


def _own_state(checkpoint: Checkpoint, engine: Engine, key: str, of: LocalPart) -> list[LocalPart]:
    """A state that only the rank that wrote it can read; empty if the rank had none."""
    saved, now = checkpoint.index.world_size, engine.plan.mesh.world_size
    if saved != now or of.cut is not None:
        raise CheckpointError(
            f"checkpoint '{checkpoint.path}': expected {saved} ranks and the same strategy, "
            f"because {key} was saved per rank; there are {now} ranks. It cannot be resharded, "
            "because its shape differs from its parameter's."
        )
    own = checkpoint.read_own(key, engine.rank, (of.start, of.stop))
    if own is None:
        return []
    local = _tensor_of(own[1], DTYPES[checkpoint.index.tensors[key].dtype])
    state = key.rpartition("/")[2]
    return [LocalPart((of.names[0], state), own[0], of.start, of.stop, local, opaque=True)]


_LEFT_OUT = object()


def _value(checkpoint: Checkpoint, engine: Engine, name: str, coded: Any) -> Any:
    """A value of state.json, or _LEFT_OUT.

    A value per rank needs ranks that share batches as those did that saved it: tensor-parallel
    neighbours draw the same random numbers, and data-parallel ranks must not. For the same reason
    random states of a single batch are left out if there are several batches now.
    """
    get_tensor = partial(state_tensor, checkpoint, engine.rank)
    now = batches_of(engine.plan.mesh)
    saved = checkpoint.state.get("batches", list(range(checkpoint.index.world_size)))
    is_own = isinstance(coded, dict) and set(coded) == {OWN}
    if is_own and saved == now:
        own = checkpoint.read_own(key_of(Kind.STATE, name, OWN), engine.rank)
        assert own is not None, name
        return checkpoint.value(name, json.loads(own[1].decode()), get_tensor)
    if not is_own and (name != RANDOM or max(saved) > 0 or max(now) == 0):
        return checkpoint.value(name, coded, get_tensor)
    if engine.rank == 0:
        logger.warning(
            "%s: %r was not restored, because it differs between ranks or batches: it was saved "
            "by %d ranks with %d batches; now there are %d ranks with %d batches on another mesh",
            *(checkpoint.path, name, len(saved), max(saved) + 1, len(now), max(now) + 1),
        )
    return _LEFT_OUT


def state_tensor(checkpoint: Checkpoint, rank: int, path: str) -> torch.Tensor:
    """A tensor in state.json, as this rank saved it."""
    return stored_tensor(checkpoint, key_of(Kind.STATE, path), rank)


def stored_tensor(checkpoint: Checkpoint, key: str, rank: int) -> torch.Tensor:
    """A whole tensor of a checkpoint; for an opaque tensor, the part that a rank saved."""
    stored = checkpoint.index.tensors[key]
    dtype = DTYPES[stored.dtype]
    if stored.opaque:
        own = checkpoint.read_own(key, rank)
        assert own is not None, key
        return _tensor_of(own[1], dtype).view(own[0])
    tensor = torch.empty(stored.numel, dtype=dtype)
    checkpoint.read(key, 0, stored.numel, as_bytes(tensor))
    return tensor.view(stored.shape)


def _tensor_of(data: bytearray, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
