"""A file and a command line become one checked configuration whose every value has an origin.

train.yaml --+
fsdp.yaml  --+--> in our keys --> merged --> mapping --> RunConfig --> Resolved
key=value  --+    (dialects)
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fullshard.config.dialects.rules import Note, Status, is_auto
from fullshard.config.dialects.trainer import TRAINING
from fullshard.config.dialects.translate import (
    Translation,
    agree,
    contradiction,
    leaves,
)
from fullshard.config.environment import LaunchEnvironment
from fullshard.config.files import (
    File,
    drop,
    find,
    interpolated,
    is_below,
    put,
    read_file,
    read_job,
    readable,
)
from fullshard.config.keys import PLAIN_KEYS, at_home, canonical, derived_from, rivals_of
from fullshard.config.origins import Entry, Index, Origin, OriginKind
from fullshard.config.overrides import Override, parse_overrides
from fullshard.config.problems import ConfigProblems, Problem
from fullshard.config.schema import RunConfig
from fullshard.config.supported import check_supported
from fullshard.config.write import flatten, write_yaml
from fullshard.errors import FullshardError

_NO_MODEL = {"name_or_path": None, "config": None, "trust_remote_code": False}

ErrorT = TypeVar("ErrorT", bound=FullshardError)


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A configuration, and where each of its values came from.

    Args:
        config: the whole configuration, checked.
        origins: by dotted key, for every value of it.
        index: finds the place of any key that somebody wrote.
        notes: what became of every key of another tool.
        dialects: of the files, in their order; "fullshard" is ours.
        is_without_model: no model was given, and a name stands in its place.
        job: the job of ours that was read, if no file was.
    """

    config: RunConfig
    origins: Mapping[str, Origin]
    index: Index = dataclasses.field(repr=False)
    notes: tuple[Note, ...] = ()
    dialects: tuple[str, ...] = ()
    is_without_model: bool = False
    job: str = ""

    def to_yaml(self, *, with_defaults: bool = True) -> str:
        """The configuration as YAML with every origin as a comment; loads to an equal one."""
        return write_yaml(self.config, self.origins, with_defaults=with_defaults)

    def for_ranks(self, world_size: int) -> Resolved:
        """The same with `training.train_batch_size` divided over ranks and micro-batches.

        Raises:
            ConfigError: it does not divide.
        """
        training = self.config.training
        if training.train_batch_size is None:
            return self
        try:
            divided = training.divided(world_size)
        except ConfigProblems as error:
            raise error.map(lambda p: self.index.locate(p.below("training"))) from None
        return dataclasses.replace(
            self, config=self.config.model_copy(update={"training": divided})
        )

    def is_chosen(self, key: str) -> bool:
        """Whether the user set a value; a default or a job that ships with fullshard did not."""
        origin = self.origins.get(key)
        return origin is not None and bool(origin.place) and origin.file != self.job

    def place_of(self, key: str) -> str:
        """`train.yaml:12`, or nothing for what nobody wrote."""
        return self.index.origin_of(key, is_default=True).place

    def check_supported(
        self, *, planning: bool = False, launch: LaunchEnvironment | None = None
    ) -> None:
        """As `supported.check_supported`, with the place of every value that it refuses."""
        try:
            check_supported(self.config, planning=planning, launch=launch)
        except ConfigProblems as error:
            raise error.map(self.index.locate) from None

    def located(self, error: ErrorT) -> ErrorT | ConfigProblems:
        """The same error with its place in front, where its text begins with a key of a file.

        For checks that come later than this one (is the data there, is the mesh possible), so
        that their errors name the line too.
        """
        if isinstance(error, ConfigProblems):
            return error.map(self.index.locate)
        text = str(error)
        if self.config.model == self.config.teacher:  # a student that begins as its teacher
            text = re.sub(r"\bmodel\.(name_or_path|trust_remote_code)", r"teacher.\1", text)
        key, colon, said = text.partition(": ")
        for full in (key, f"sharding.{key}"):  # the planner knows ShardConfig's names alone
            origin = self.origins.get(full) or self.index.origin_of(full, is_default=True)
            if colon and origin.place:
                is_theirs = origin.kind is OriginKind.DERIVED  # their key is what stands there
                name = origin.written if is_theirs else full
                return type(error)(f"{origin.place}: {name}: {said}")
        return error


def load_config(
    path: Path | Sequence[Path | File] | None,
    overrides: Sequence[str] = (),
    *,
    needs_model: bool = True,
) -> Resolved:
    """Read files in any dialect and merge the command line into them.

    Args:
        path: a YAML or JSON file, or several (some read already), later ones replacing keys of
            earlier ones; None: the main job, which ships with fullshard.
        overrides: `a.b.key=value`, or `key=value` where only one key has that name.
        needs_model: False: a configuration without a model is whole too, for explaining it.

    Raises:
        ConfigError: with everything that is wrong with the input, and its places.
    """
    given = path if isinstance(path, Sequence) else [path or read_job()]
    last = given[-1]
    name = last.name if isinstance(last, File) else str(last)
    with readable(name):
        return _load(given, overrides, name, needs_model=needs_model)


def _load(
    paths: Sequence[Path | File], overrides: Sequence[str], name: str, *, needs_model: bool
) -> Resolved:
    files: list[File] = []
    layers: list[Translation] = []
    try:
        files += [path if isinstance(path, File) else read_file(path) for path in paths]
        present = [canonical(entry.key) for file in files for entry in file.entries]
        given, problems = parse_overrides(overrides, present)
        layers = [Translation(file.without(_replaced_names(given))) for file in files]
        layers.append(_command_line(given))
        _check_engines(layers)
        problems += _contradictions(layers)
        entries, merged = _merge(layers)
    except ConfigProblems as error:  # `${nowhere}`, `???`: where it stands is not said yet
        written = [entry for one in (*files, *layers) for entry in one.entries]
        raise error.map(Index(written, name).locate) from None
    index = Index(entries, name)
    names = ("model", "student", "teacher")  # a student's other name; it may begin as its teacher
    is_without_model = not needs_model and all(merged.get(name) is None for name in names)
    if is_without_model:
        merged["model"] = {"name_or_path": "MODEL"}
    problems += [problem for layer in layers for problem in layer.problems]
    try:
        config = RunConfig(**merged)
    except ConfigProblems as error:
        problems += (index.locate(at_home(problem)) for problem in error.problems)
        raise ConfigProblems(problems) from None
    if problems:
        raise ConfigProblems(problems)
    notes = [_judge(note, index) for layer in layers for note in layer.notes]
    dialects = tuple(layer.dialect or "fullshard" for layer in layers[:-1])
    origins = _origins(config, index)
    job = name if files[-1].is_ours else ""
    return Resolved(config, origins, index, tuple(notes), dialects, is_without_model, job)


def _replaced_names(given: Sequence[Override]) -> list[str]:
    """What the command line says under the Trainer's own name, and a flat file without prefix."""
    keys = [o.key for o in given if o.key.partition(".")[2].partition(".")[0] in TRAINING]
    return [*keys, *(key.removeprefix("training.") for key in keys)]


def _command_line(given: Sequence[Override]) -> Translation:
    """The command line as one more file, of which keys of the Trainer's are translated."""
    values: dict[str, Any] = {}
    entries: dict[str, Entry] = {}
    for override in given:
        put(values, override.key, override.value)
        origin = Origin(OriginKind.COMMAND_LINE, written=override.written)
        entries[override.key] = Entry(override.key, origin)
    return Translation(File("command line", Path(), values, list(entries.values())))


def _check_engines(layers: Sequence[Translation]) -> None:
    """One model cannot be sharded by two engines, in whatever files they are asked for.

    Raises:
        ConfigError: FSDP and DeepSpeed are both asked for.
    """
    asked: dict[str, Origin] = {}
    for engine, origin in (one for layer in layers for one in layer.engines):
        asked.setdefault(engine, origin)
    if len(asked) < 2:
        return
    fsdp, deepspeed = asked["FSDP"], asked["DeepSpeed"]
    got = f"DeepSpeed beside FSDP, which {fsdp.written} ({fsdp.place}) asks for"
    why = "Both shard the same parameters, so only one can; fullshard runs either file alone"
    problem = Problem(deepspeed.written, "one of FSDP and DeepSpeed", got, why, deepspeed.place)
    raise ConfigProblems([problem])


def _contradictions(layers: Sequence[Translation]) -> list[Problem]:
    """What a file that the command line names (`--deepspeed ds.json`) and another file say.

    Neither was typed, so neither wins, as in Hugging Face's Trainer.
    """
    *files, last = layers
    before = {canonical(e.key): (file, e) for file in files for e in leaves(file.entries)}
    problems: list[Problem] = []
    for entry in last.entries:
        file, other = before.get(canonical(entry.key), (last, entry))
        value, said = find(last.values, entry.key), find(file.values, other.key)
        if entry.origin.file and not agree(entry.key, value, said):
            both = (value, entry.origin), (said, other.origin)
            problems.append(contradiction(entry.key, *both))
    return problems


def _merge(layers: Sequence[Translation]) -> tuple[list[Entry], dict[str, Any]]:
    """One list of keys and one mapping, in which later layers replace what earlier ones say."""
    first, *later = layers
    merged, entries = first.values, first.entries
    for layer in later:
        # `sharding={...}` of the command line replaces a section, one of a file does not.
        given = layer.entries if layer is layers[-1] else leaves(layer.entries)
        updates = {canonical(entry.key): entry for entry in given}
        replaced = {key for name in updates for key in (name, *rivals_of(name))}
        # What is left to be chosen says nothing that another key could contradict.
        said = {name: find(layer.values, entry.key) for name, entry in updates.items()}
        replaced -= {
            rival
            for name in updates
            for rival in rivals_of(name)
            if rival not in updates and (is_auto(said[name]) or is_auto(find(merged, rival)))
        }
        gone = [entry for entry in entries if is_below(_full_key(entry.key, merged), replaced)]
        entries = [entry for entry in entries if entry not in gone]
        for entry in gone:
            if entry.key not in updates:  # an update keeps the key's place
                drop(merged, entry.key)
        for key, entry in updates.items():
            value = find(layer.values, entry.key)
            if value is None and key in RunConfig.field_names():
                continue  # `training:` with nothing below it
            put(merged, key, value)
            entries.append(dataclasses.replace(entry, key=key))
    return entries, interpolated(merged)


def _full_key(key: str, values: Mapping[str, Any]) -> str:
    """Our name of a key; `model: FOLDER` is model.name_or_path."""
    is_plain = key in PLAIN_KEYS and not isinstance(values.get(key), dict)
    return f"{key}.{PLAIN_KEYS[key]}" if is_plain else canonical(key)


def _judge(note: Note, index: Index) -> Note:
    """A note of a key that another one has replaced says so."""
    if note.status is not Status.TRANSLATED or not note.targets:
        return note
    deciding = [index.origin_of(target, is_default=True) for target in note.targets]
    if any((o.place, o.written) == (note.place, note.key) for o in deciding):
        return note
    decides = next((f"{o.written} ({o.place})" for o in deciding if o.place), "another key")
    return dataclasses.replace(note, status=Status.NO_EFFECT, why=f"{decides} decides")


def _origins(config: RunConfig, index: Index) -> dict[str, Origin]:
    """The origin of every value, by dotted key."""
    # model has no default: whichever of its keys is there was written.
    defaults = flatten({**RunConfig(model=config.model).to_dict(), "model": dict(_NO_MODEL)})
    values = flatten(config.to_dict())
    return {
        key: index.origin_of(
            key,
            is_default=values[key] == defaults.get(key),
            sources=[source for source in derived_from(key) if values[source]],
        )
        for key in values
    }
