"""fs.save: what the engine holds, written slice by slice.

model, optimizer ---> Held ---> (staging) ---> Piece ---> this rank's files
the caller's values ---> JSON, once where all ranks have the same
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import xxhash
from torch import nn

from fullshard.checkpoint import commit
from fullshard.checkpoint.background import Saves
from fullshard.checkpoint.examine import remove, superfluous
from fullshard.checkpoint.files import Piece, Written, write_tensors
from fullshard.checkpoint.format import (
    CONFIG,
    OWN,
    PLAN,
    STATE,
    Kind,
    file_name,
    key_of,
    kind_of,
    step_name,
)
from fullshard.checkpoint.retain import tidy
from fullshard.checkpoint.values import encode
from fullshard.engine.agreement import agree, tell
from fullshard.engine.engine import Engine, engine_of, refuse_other_axes
from fullshard.engine.owned import OwnedOptimizer
from fullshard.engine.random_state import random_state
from fullshard.engine.state import (
    Held,
    OptimizerState,
    as_bytes,
    dtype_name,
    extra_states,
    join_scalars,
    model_tensors,
    optimizer_state,
    tied_names,
)
from fullshard.errors import CheckpointError, PreemptedError, ran_out_of_memory

# What is saved beside what the caller gives.
RANDOM, EXTRA = "$random", "$extra"
GROUPS, SCALARS = "$optimizer.groups", "$optimizer.scalars"

SAVES = Saves()

logger = logging.getLogger(__name__)

Stage = Callable[[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class SaveSettings:
    """How a checkpoint is saved.

    Attributes:
        step: Its step; None: the folder itself is the checkpoint.
        wait: Return when it is complete.
        keep: Complete checkpoints to keep in the folder, this one among them; None: all.
        texts: Further files by name.
    """

    step: int | None = None
    wait: bool = True
    keep: int | None = None
    texts: Mapping[str, str] = field(default_factory=dict[str, str])


def save(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: Mapping[str, Any],
    settings: SaveSettings,
) -> Path:
    """Save what every rank holds. A collective: it returns when the ranks' state is safe to change.

    Raises:
        CheckpointError: On every rank, if any cannot write; checkpoints of before are untouched.
    """
    engine = engine_of(model)
    refuse_other_axes(engine, "fs.save", "Save fs.full_state_dict(model).")
    agree(engine, SAVES.wait)
    agree(engine, lambda: _check_step(settings.step))
    target = folder / step_name(settings.step) if settings.step is not None else folder
    stage = _as_it_is if settings.wait else STAGING.setdefault(model, _Staging()).copy
    states = agree(engine, lambda: _states_of(model, optimizer))
    if states is not None and isinstance(optimizer, OwnedOptimizer):
        states = replace(states, scalars=join_scalars(tell(engine, states.scalars)))
    parts = agree(engine, lambda: _Parts.of(model, states, state, stage))
    pieces, document = parts.joined(engine, settings.step)
    place = _open_place(engine, target.resolve(), settings)  # links stay, and so may the caller
    texts = {
        STATE: document,
        PLAN: engine.plan.to_json(),
        **_configuration(model),
        **settings.texts,
    }
    documents = commit.Documents(settings.step, texts, tied_names(model))
    seat = (engine.rank, engine.plan.mesh.world_size)
    work = partial(write_files, seat, place, pieces, documents, settings.keep)
    if settings.wait:
        work()
    else:
        SAVES.start(work)
    return target


def _states_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> OptimizerState | None:
    return None if optimizer is None else optimizer_state(model, optimizer)


def _check_step(step: Any) -> None:
    if step is not None and (not isinstance(step, int) or step < 0):
        raise CheckpointError(
            f"fs.save: expected a step that is an integer >= 0, or None; got {step!r}."
        )


def _configuration(model: nn.Module) -> dict[str, str]:
    """config.json and generation_config.json of a Hugging Face model: to export it, nothing else
    is needed."""
    texts: dict[str, str] = {}
    for name in ("config", "generation_config"):
        to_json = getattr(getattr(model, name, None), "to_json_string", None)
        if to_json is not None:
            texts[f"{name}.json"] = to_json()
    if CONFIG in texts:
        table = {**json.loads(texts[CONFIG]), "architectures": [type(model).__name__]}
        texts[CONFIG] = json.dumps(table, indent=2)
    return texts


class _Staging:
    """Copies on the host of what is saved while training goes on; kept for the next save."""

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}

    def copy(self, key: str, local: torch.Tensor) -> torch.Tensor:
        """(numel,), safe to read while the original changes."""
        copy = self._copies.get(key)
        if copy is None or copy.shape != local.shape or copy.dtype is not local.dtype:
            pinned = local.device.type == "cuda"
            copy = torch.empty(local.shape, dtype=local.dtype, pin_memory=pinned)
            self._copies[key] = copy
        copy.copy_(local)
        return copy


STAGING: WeakKeyDictionary[nn.Module, _Staging] = WeakKeyDictionary()  # freed with the model


def _as_it_is(_key: str, local: torch.Tensor) -> torch.Tensor:
    return local


@dataclass(frozen=True)
class _Parts:
    """What one rank has to save, before the ranks have compared their values.

    Attributes:
        pieces: Slices of model and optimizer.
        kind: The optimizer's class; empty where there is none.
        values: What the caller gave, and what else is no tensor of model or optimizer, by name.
    """

    pieces: list[Piece]
    kind: str
    values: dict[str, Values]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        saved: OptimizerState | None,
        state: Mapping[str, Any],
        stage: Stage,
    ) -> _Parts:
        pieces = [_piece(Kind.MODEL, held, stage) for held in model_tensors(model) if held.writes]
        values: dict[str, Any] = {EXTRA: extra_states(model), RANDOM: random_state()}
        kind = ""
        if saved is not None:
            kind = saved.kind
            pieces += [_piece(Kind.OPTIMIZER, h, stage) for h in saved.tensors if h.writes]
            values |= {GROUPS: saved.groups, SCALARS: saved.scalars}
        return cls(pieces, kind, {n: Values(n, v) for n, v in {**values, **state}.items()})

    def joined(self, engine: Engine, step: int | None) -> tuple[list[Piece], str]:
        """What this rank writes, and state.json: values that differ are each rank's own.

        Raises:
            CheckpointError: The ranks gave values of other names.
        """
        digests = {name: value.digest() for name, value in self.values.items()}
        told = tell(engine, digests)
        for rank, other in enumerate(told):
            if set(other) != set(told[0]):
                raise CheckpointError(
                    f"fs.save: expected the same state on every rank; got {sorted(told[0])} on "
                    f"rank 0 and {sorted(other)} on rank {rank}. Pass the same names on all."
                )
        coded: dict[str, Any] = {}
        pieces = list(self.pieces)
        for name, value in self.values.items():
            if all(other[name] == digests[name] for other in told):
                coded[name] = value.coded
                pieces += value.pieces if engine.rank == 0 else []
            else:
                coded[name] = {OWN: name}
                pieces += value.as_own(name)
        facts = {"step": step, "world_size": len(told), "extra": coded.pop(EXTRA)}
        if self.kind:
            groups, scalars = coded.pop(GROUPS), coded.pop(SCALARS)
            facts["optimizer"] = {"class": self.kind, "groups": groups, "scalars": scalars}
        facts["state"] = coded
        return [piece for piece in pieces if piece.is_there], json.dumps(facts, indent=1)


class Values:
    """A value as JSON, with the tensors in it."""

    def __init__(self, name: str, value: Any) -> None:
        self.pieces: list[Piece] = []
        self._names: set[str] = set()
        self.coded = encode(value, name, self._keep)

    def digest(self) -> str:
        """Of everything in it."""
        digest = xxhash.xxh3_128(json.dumps(self.coded).encode())
        for piece in self.pieces:
            digest.update(piece.data())
        return digest.hexdigest()

    def as_own(self, name: str) -> list[Piece]:
        """The pieces that hold it as one rank's affair."""
        data = json.dumps(self.coded).encode()
        key = key_of(Kind.STATE, name, OWN)
        text = Piece(key, "U8", (len(data),), 0, len(data), lambda: memoryview(data), opaque=True)
        return [text, *(replace(piece, opaque=True) for piece in self.pieces)]

    def _keep(self, path: str, value: Any) -> str | None:
        if not isinstance(value, torch.Tensor):
            return None
        plain = value.detach()
        if type(plain) is not torch.Tensor:
            raise CheckpointError(
                f"{path}: expected plain tensors; got {type(value).__name__}. Shards are saved "
                "with their model and optimizer; give others as p.full_tensor()."
            )
        local = plain.reshape(-1).to("cpu", copy=True)
        name = path
        while name in self._names:  # {"a.b": x, "a": {"b": y}}
            name += "~"
        self._names.add(name)
        self.pieces.append(
            Piece(
                key_of(Kind.STATE, name),
                dtype_name(value, path),
                tuple(value.shape),
                0,
                local.numel(),
                partial(as_bytes, local),
            )
        )
        return name


def _piece(kind: Kind, held: Held, stage: Stage) -> Piece:
    key = key_of(kind, *held.names)
    local = stage(key, held.local)
    return Piece(
        key,
        held.dtype,
        held.shape,
        held.start,
        held.stop,
        lambda: as_bytes(local.to("cpu").contiguous()),
        held.opaque,
    )


def _open_place(engine: Engine, target: Path, settings: SaveSettings) -> commit.Place:
    """The folder aside, which all ranks see. A collective."""

    def claim() -> commit.Place | None:
        if engine.rank != 0:
            return None
        if settings.step is not None:
            SAVES.claim_folder(target.parent)
        tidy(target)
        return commit.claim(target)

    place = tell(engine, agree(engine, claim))[0]
    assert place is not None
    try:
        agree(engine, partial(commit.join, place, engine.rank))
    except CheckpointError:
        if engine.rank == 0:
            commit.abandon(place)
        raise
    return place


def write_files(
    seat: tuple[int, int],
    place: commit.Place,
    pieces: list[Piece],
    documents: commit.Documents,
    keep: int | None,
) -> None:
    """Write this rank's files, and see the checkpoint complete. No collective: see commit.py."""
    rank, world_size = seat
    outcome: list[Written] | CheckpointError = []
    stopped: BaseException | None = None
    try:
        for kind in Kind:
            of_kind = [piece for piece in pieces if kind_of(piece.key) is kind]
            if of_kind:
                path = place.aside / file_name(kind, rank)
                outcome.append(write_tensors(path, of_kind, rank))
    except BaseException as error:  # noqa: BLE001  the other ranks wait for what this one says
        outcome = commit.failure(place.target, rank, error)
        is_exception = isinstance(error, Exception) and not isinstance(error, PreemptedError)
        if not is_exception or ran_out_of_memory(error):
            stopped = error  # no failure to write
    commit.report(place, rank, outcome)
    try:
        if rank != 0:
            commit.await_verdict(place, rank)
            return
        commit.conclude(place, world_size, documents)
    except CheckpointError as error:
        raise stopped or error from error
    if keep is not None and documents.step is not None:
        try:
            remove(superfluous(place.target.parent, keep, documents.step))
        except CheckpointError as error:  # this one is complete: no reason to end a run
            logger.warning("older checkpoints stay: %s", error)
