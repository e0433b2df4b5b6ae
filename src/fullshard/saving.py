"""fs.save: writes the engine's state slice by slice, and the random states of the process.

model, optimizer ---> LocalPart ---> (staging) ---> Piece ---> this rank's files
the caller's values ---> JSON, once if they are equal on all ranks
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import random
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from os.path import realpath
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import xxhash
from torch import nn
from torch.optim import Optimizer

from fullshard.checkpoint import commit
from fullshard.checkpoint.commit import Ranks
from fullshard.checkpoint.files import Piece, Written, write_tensors
from fullshard.checkpoint.format import (
    CONFIG,
    OWN,
    PLAN,
    STATE,
    Kind,
    encode,
    file_name,
    key_of,
    kind_of,
    step_name,
)
from fullshard.checkpoint.read import remove, superfluous
from fullshard.checkpoint.retain import tidy
from fullshard.checkpoint.storage import StorePath, storage_path
from fullshard.engine.engine import Engine, engine_of
from fullshard.engine.homes import Residence
from fullshard.engine.owned import OwnedOptimizer
from fullshard.engine.state import (
    LocalPart,
    OptimizerState,
    as_bytes,
    dtype_name,
    extra_states,
    join_scalars,
    model_tensors,
    optimizer_state,
    tied_names,
)
from fullshard.engine.unit import Member
from fullshard.errors import CheckpointError, FullshardError, OutOfMemoryError, ran_out_of_memory
from fullshard.observe.metrics import wait_until
from fullshard.planner.mesh import Mesh
from fullshard.planner.units import Place

# Names of values that are saved in addition to the caller's.
RANDOM, EXTRA = "$random", "$extra"
GROUPS, SCALARS = "$optimizer.groups", "$optimizer.scalars"
LOOKED_AT_S = 0.25  # another process may lock a folder for a moment, to see whether it is free

logger = logging.getLogger(__name__)

Stage = Callable[[str, torch.Tensor], torch.Tensor] | None


@dataclass(frozen=True)
class SaveSettings:
    """How a checkpoint is saved.

    Attributes:
        step: Step of the checkpoint; None: the folder itself is the checkpoint.
        wait: Whether to return only once it is complete.
        keep: Number of complete checkpoints to keep in the folder, including this one; None: all.
        texts: Contents of further files by name.
    """

    step: int | None = None
    wait: bool = True
    keep: int | None = None
    texts: Mapping[str, str] = field(default_factory=dict[str, str])

    def target(self, folder: Path) -> Path:
        """The checkpoint's own folder."""
        return folder if self.step is None else folder / step_name(self.step)


def save(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer | None,
    state: Mapping[str, Any],
    settings: SaveSettings,
) -> Path:
    """Saves the state of all ranks. A collective; afterwards the state may be changed.

    Raises:
        CheckpointError: On every rank, if any cannot write; older checkpoints are untouched.
    """
    engine = engine_of(model)
    engine.agree(SAVES.wait)
    engine.agree(lambda: _check_step(settings.step))
    stage = None if settings.wait else STAGING.setdefault(model, _Staging()).copy
    states = None
    if optimizer is not None:
        states = engine.agree(lambda: optimizer_state(model, optimizer))
        states = replace(states, tensors=_as_ranges(engine, states.tensors))
    if states is not None and isinstance(optimizer, OwnedOptimizer):
        states = replace(states, scalars=join_scalars(engine.all_values(states.scalars)))
    tensors = _as_ranges(engine, engine.agree(lambda: model_tensors(model)))
    pieces, values = engine.agree(lambda: _parts(model, tensors, states, state, stage))
    pieces, document = _joined(engine, settings.step, states, pieces, values)
    texts = {STATE: document, PLAN: engine.plan.to_json()}
    texts |= {**_configuration(model), **settings.texts}
    documents = commit.Documents(settings.step, texts, tied_names(model))
    return write(ranks_of(engine), settings.target(folder), pieces, documents, settings)


def _as_ranges(engine: Engine, tensors: list[LocalPart]) -> list[LocalPart]:
    """Ranges of whole tensors in place of parts that are none. A collective.

    A part that another axis cut along a later dimension is a range of each row. Such a tensor is
    gathered, and each rank keeps an equal range of the whole.

    Raises:
        FullshardError: On every rank, if any failed.
    """
    members = {member.piece.name: member for member in engine.members}
    found = [part for part in tensors if part.cut is None]
    for part in tensors:
        if part.cut is not None:
            member = members[part.names[0]]
            local = engine.agree(partial(part.local.to, engine.device))
            whole = member.gather_whole(local, "/".join(part.names)).reshape(-1)
            found.append(engine.agree(partial(_range_of, part, member, whole)))
    return found


def _range_of(part: LocalPart, member: Member, whole: torch.Tensor) -> LocalPart:
    """An equal range of a whole tensor per rank that has different elements of it."""
    unit, cut = member.group.unit, part.cut
    assert cut is not None
    at, parts = unit.shard_index * cut.num_parts + cut.part, unit.plan.mesh.shard * cut.num_parts
    start, stop = (whole.numel() * index // parts for index in (at, at + 1))
    local = whole[start:stop].to("cpu", copy=True)
    return replace(part, start=start, stop=stop, local=local, cut=None)


def ranks_of(engine: Engine) -> Ranks:
    """The processes of an engine."""
    return Ranks(engine.rank, engine.plan.mesh.world_size, engine.lead, engine.agree)


def write(
    ranks: Ranks,
    target: Path,
    pieces: list[Piece],
    documents: commit.Documents,
    settings: SaveSettings,
) -> Path:
    """Writes a checkpoint, here or on a thread of its own; returns its folder. A collective.

    Args:
        ranks: The processes that save together.
        target: Folder of the checkpoint.
        pieces: Slices that this rank writes.
        documents: Step, further files and tied names.
        settings: Whether to wait, and how many checkpoints to keep.
    """
    target = storage_path(target)
    real = target.resolve() if isinstance(target, StorePath) else Path(realpath(target))
    place = _open_place(ranks, real, settings)  # links stay
    work = partial(_write_files, ranks, place, pieces, documents, settings.keep)
    if not settings.wait:
        SAVES.start(work)
        return target
    try:
        work()
    except BaseException:  # perhaps a signal's
        if ranks.world_size == 1:  # no other rank reads its notes
            commit.abandon(place)
        raise
    return target


def _check_step(step: Any) -> None:
    if step is not None and (type(step) is not int or step < 0):
        raise CheckpointError(f"fs.save: expected a step >= 0, an integer or None; got {step!r}.")


def _configuration(model: nn.Module) -> dict[str, str]:
    """config.json and generation_config.json of a Hugging Face model, which an export needs."""
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
    """Host copies of state that is saved during training; reused by the next save."""

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}

    def copy(self, key: str, local: torch.Tensor) -> torch.Tensor:
        """(numel,), safe to read while the original changes."""
        copy = self._copies.get(key)
        if copy is None or copy.shape != local.shape or copy.dtype is not local.dtype:
            home = Residence.of(Place.HOST, local.device, None)
            copy = self._copies[key] = home.zeros(local.numel(), local.dtype).view(local.shape)
        copy.copy_(local)
        return copy


STAGING: WeakKeyDictionary[nn.Module, _Staging] = WeakKeyDictionary()  # freed with the model


def _parts(
    model: nn.Module,
    tensors: list[LocalPart],
    saved: OptimizerState | None,
    state: Mapping[str, Any],
    stage: Stage,
) -> tuple[list[Piece], dict[str, CodedValue]]:
    """This rank's slices of model and optimizer, and all other values by name."""
    pieces = [_piece(Kind.MODEL, part, stage) for part in tensors if part.writes]
    values: dict[str, Any] = {EXTRA: extra_states(model), RANDOM: random_state()}
    if saved is not None:
        pieces += [_piece(Kind.OPTIMIZER, h, stage) for h in saved.tensors if h.writes]
        values |= {GROUPS: saved.groups, SCALARS: saved.scalars}
    return pieces, {n: CodedValue(n, v) for n, v in {**values, **state}.items()}


def _joined(
    engine: Engine,
    step: int | None,
    saved: OptimizerState | None,
    pieces: list[Piece],
    values: dict[str, CodedValue],
) -> tuple[list[Piece], str]:
    """The slices that this rank writes, and state.json; each rank saves values that differ.

    Raises:
        CheckpointError: The names of the values differ between ranks.
    """
    digests = {name: value.digest() for name, value in values.items()}
    found = engine.all_values(digests)
    for rank, other in enumerate(found):
        if set(other) != set(found[0]):
            raise CheckpointError(
                f"fs.save: expected the same names of state on every rank; got {sorted(found[0])} "
                f"on rank 0 and {sorted(other)} on rank {rank}. Pass the same names on all ranks."
            )
    coded: dict[str, Any] = {}
    for name, value in values.items():
        if all(other[name] == digests[name] for other in found):
            coded[name] = value.coded
            pieces += value.pieces if engine.rank == 0 else []
        else:
            coded[name] = {OWN: name}
            pieces += value.as_own(name)
    facts = {"step": step, "world_size": len(found), "extra": coded.pop(EXTRA)}
    if saved is not None:
        groups, scalars = coded.pop(GROUPS), coded.pop(SCALARS)
        facts["optimizer"] = {"class": saved.kind, "groups": groups, "scalars": scalars}
    if engine.plan.mesh.inner > 1:
        facts["batches"] = batches_of(engine.plan.mesh)
    facts["state"] = coded
    return [piece for piece in pieces if piece.is_there], json.dumps(facts, indent=1)


def batches_of(mesh: Mesh) -> list[int]:
    """Index of each rank's batch: ranks of other axes, such as tensor parallelism, share one."""
    ranks = range(mesh.world_size)
    return list(ranks) if mesh.inner == 1 else [mesh.place(rank) // mesh.inner for rank in ranks]


class CodedValue:
    """A value as JSON, and its tensors."""

    def __init__(self, name: str, value: Any) -> None:
        self.pieces: list[Piece] = []
        self._names: set[str] = set()
        self.coded = encode(value, name, self._keep)

    def digest(self) -> str:
        """Digest of the value and its tensors."""
        digest = xxhash.xxh3_128(json.dumps(self.coded).encode())
        for piece in self.pieces:
            digest.update(piece.data())
        return digest.hexdigest()

    def as_own(self, name: str) -> list[Piece]:
        """Slices that store the value for this rank only."""
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
                "with their model and optimizer; pass other shards as p.full_tensor()."
            )
        if plain.layout is not torch.strided or plain.is_meta:
            raise CheckpointError(
                f"{path}: expected a dense tensor; got one of {plain.layout} on {plain.device}. "
                "Convert it before saving."
            )
        local = plain.reshape(-1).to("cpu", copy=True)
        name = path
        while name in self._names:  # {"a.b": x, "a": {"b": y}}
            name += "~"
        self._names.add(name)
        key, shape, data = key_of(Kind.STATE, name), tuple(value.shape), partial(as_bytes, local)
        dtype = dtype_name(value.dtype, path)
        self.pieces.append(Piece(key, dtype, shape, 0, local.numel(), data))
        return name


def _piece(kind: Kind, part: LocalPart, stage: Stage) -> Piece:
    key = key_of(kind, *part.names)
    local = part.local if stage is None else stage(key, part.local)
    span = part.start, part.stop, lambda: as_bytes(local.to("cpu").contiguous())
    return Piece(key, part.dtype, part.shape, *span, part.opaque)


def _open_place(ranks: Ranks, target: Path, settings: SaveSettings) -> commit.Paths:
    """Makes the temporary folder, which all ranks see. A collective."""

    def claim() -> str:
        if settings.step is not None:
            SAVES.claim_folder(target.parent)
        tidy(target)
        return commit.claim(target).token

    place = commit.Paths(target, ranks.lead(claim))
    try:
        ranks.agree(partial(commit.join, place, ranks.rank))
    except BaseException:
        if ranks.rank == 0:
            commit.abandon(place)
        raise
    return place


def _write_files(
    ranks: Ranks,
    place: commit.Paths,
    pieces: list[Piece],
    documents: commit.Documents,
    keep: int | None,
) -> None:
    """Writes this rank's files and completes the checkpoint. Not a collective: see commit.py."""
    rank = ranks.rank
    outcome: list[Written] | CheckpointError = []
    stopped: BaseException | None = None
    try:
        for kind in Kind:
            of_kind = [piece for piece in pieces if kind_of(piece.key) is kind]
            if of_kind:
                outcome.append(write_tensors(place.aside / file_name(kind, rank), of_kind, rank))
    except BaseException as error:  # noqa: BLE001  the other ranks wait for this rank's result
        outcome = commit.failure(place.target, rank, error)
        if not isinstance(error, Exception) or ran_out_of_memory(error):
            stopped = error  # no failure to write
    commit.report(place, rank, outcome)
    try:
        if rank != 0:
            commit.await_verdict(place, rank, ranks.world_size)
            return
        commit.conclude(place, ranks.world_size, documents)
    except CheckpointError as error:
        raise stopped or error from error
    except OSError as error:
        raise stopped or commit.failure(place.target, rank, error) from error
    if keep is not None and documents.step is not None:
        try:
            remove(superfluous(place.target.parent, keep, documents.step))
        except (CheckpointError, OSError) as error:  # the new checkpoint is complete
            logger.warning("older checkpoints stay: %s", error)


class Saves:
    """The saves of this process; at most one is in progress.

    It also locks the folders into which this process saves steps: a second run there would count
    and remove the checkpoints of the first.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: FullshardError | None = None
        self._claims: dict[Path, int] = {}
        self._at_exit_set = False

    @property
    def under_way(self) -> bool:
        """Whether a save is in progress."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], None]) -> None:
        """Runs `work` on a thread after `wait`; the next call of that raises its error."""

        def run() -> None:
            try:
                work()
            except FullshardError as error:
                self._error = error
            except Exception as error:  # noqa: BLE001  whatever it is, the caller must hear of it
                kind = OutOfMemoryError if ran_out_of_memory(error) else CheckpointError
                self._error = kind(f"saving: {type(error).__name__}: {error}")
                self._error.__cause__ = error

        self._thread = threading.Thread(target=run, name="fullshard-save", daemon=True)
        if not self._at_exit_set:
            self._at_exit_set = True
            # Before the pools of concurrent.futures, which commits use, refuse work: earlier than
            # atexit, and offered under a private name alone.
            threading._register_atexit(self._at_exit)  # type: ignore[attr-defined]
        self._thread.start()

    def wait(self) -> None:
        """Waits until no save is in progress.

        Raises:
            FullshardError: The last one failed: CheckpointError, or OutOfMemoryError.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def claim_folder(self, folder: Path) -> None:
        """Locks a folder of steps for this process until it ends; a store has no locks.

        Raises:
            CheckpointError: Another process has locked it, or the folder cannot be created.
        """
        if isinstance(folder, StorePath):
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            key = folder.resolve()
            if key in self._claims:
                return
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint '{folder}': expected a writable folder; got {error.strerror}."
            ) from error

        def is_locked() -> bool:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError:  # a file system without locks
                pass
            return True

        if not wait_until(is_locked, LOOKED_AT_S, 0.05):
            os.close(descriptor)
            raise CheckpointError(
                f"checkpoint '{folder}': expected a folder that no other run uses; another process "
                "saves its steps there. Use another folder, or end that run."
            )
        self._claims[key] = descriptor

    def _at_exit(self) -> None:
        try:
            self.wait()
        except FullshardError as error:
            logger.error("%s", error)
            sys.stdout.flush()
            os._exit(error.exit_code)  # an exit handler cannot set the exit code otherwise


SAVES = Saves()


# ---- random states -------------------------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """The states of torch's generators, Python's, and NumPy's global generator."""
    numpy: Any = np.random.get_state(legacy=True)
    kind, keys, position, has_gauss, gauss = numpy
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore a result of `random_state`."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
