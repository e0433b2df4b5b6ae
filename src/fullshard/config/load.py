"""Loads files and a command line as one checked configuration with the origin of every value.

train.yaml --+
fsdp.yaml  --+--> in our keys --> merged --> mapping --> RunConfig --> Resolved
key=value  --+    (dialects)

The end of this file writes a resolved configuration as YAML with origins (a run's config.yaml), as
text or data for `fullshard config explain`, and the JSON Schemas with which editors check files.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml

from fullshard.config.dialects.trainer import TRAINING
from fullshard.config.dialects.translate import (
    DIALECTS,
    Dialect,
    Translation,
    agree,
    contradiction,
    leaves,
)
from fullshard.config.environment import LaunchEnvironment
from fullshard.config.fields import Rejected, Section, to_flag
from fullshard.config.files import (
    DEFAULT,
    EXPONENT,
    File,
    Origin,
    OriginKind,
    drop,
    find,
    flatten,
    interpolated,
    is_below,
    parse_value,
    put,
    read_file,
    read_job,
    readable,
)
from fullshard.config.keys import (
    PLAIN_KEYS,
    at_home,
    canonical,
    derived_from,
    resolve,
    rivals_of,
    training_or_bare,
)
from fullshard.config.rules import Note, Status, is_auto
from fullshard.config.schema import ModelConfig, RunConfig, ShardConfig
from fullshard.config.supported import check_supported, idle
from fullshard.config.training import MOVED, MOVES, UNASKED, Move, names
from fullshard.config.values import ConfigProblems, Problem, did_you_mean, join_key, show
from fullshard.errors import FullshardError

_NO_MODEL = {"name_or_path": None, "config": None, "trust_remote_code": False}

ErrorT = TypeVar("ErrorT", bound=FullshardError)


# ---- the resolved configuration


class Origins:
    """Finds the origin of a key under any of its names."""

    def __init__(self, written: Mapping[str, Origin], source: str) -> None:
        """Index the keys of a configuration.

        Args:
            written: The origin of each key that was written, with the command line's keys last.
            source: The file's name, which is the place of problems of the file as a whole.
        """
        self._written = written
        self._canonical = {canonical(key): origin for key, origin in written.items()}
        self._source = source

    def origin_of(self, key: str, *, is_default: bool, sources: Iterable[str] = ()) -> Origin:
        """The origin of a value of the resolved configuration.

        Args:
            key: dotted, under our name.
            is_default: whether the value equals its default.
            sources: keys that determine the value if its own key was not written.
        """
        found = self._canonical.get(key)
        if found is not None:
            return found
        if is_default:
            return DEFAULT
        for source in sources:
            if source in self._canonical:
                return dataclasses.replace(self._canonical[source], kind=OriginKind.DERIVED)
        for parent in _parents(key):
            if parent in self._canonical:  # `model: FOLDER` is model.name_or_path
                return self._canonical[parent]
        return DEFAULT

    def locate(self, problem: Problem) -> Problem:
        """Adds the place to a problem, under the key as written."""
        if problem.place:
            return problem
        key = problem.key
        own = (self._written.get(key), *map(self._canonical.get, (key, *derived_from(key))))
        for origin in own:
            if origin is not None:
                return dataclasses.replace(problem, key=origin.written, place=origin.place)
        around = [name for name in self._written if name.startswith(f"{key}.")]
        for name in (*_parents(key), *around):
            origin = self._written.get(name) or self._canonical.get(name)
            if origin is not None:
                return dataclasses.replace(problem, place=origin.place)
        return dataclasses.replace(problem, place=self._source)


def _parents(key: str) -> Iterator[str]:
    """`a.b`, `a` of `a.b.c`."""
    while "." in key:
        key = key.rpartition(".")[0]
        yield key


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A configuration with the origins of its values.

    Args:
        config: the checked configuration.
        origins: the origin of every value, by dotted key.
        index: finds the place of any written key.
        notes: the result of every key of another tool.
        dialects: the dialects of the files, in order; "fullshard" is ours.
        job: our configuration that was read if no file was given.
    """

    config: RunConfig
    origins: Mapping[str, Origin]
    index: Origins = dataclasses.field(repr=False)
    notes: tuple[Note, ...] = ()
    dialects: tuple[str, ...] = ()
    job: str = ""

    @property
    def is_without_model(self) -> bool:
        """Whether no model was given; both fields of the configuration's model are then None."""
        return self.origins["model.name_or_path"].kind is OriginKind.MISSING

    def to_yaml(self, *, with_defaults: bool = True) -> str:
        """The configuration as YAML with every origin as a comment; loads to an equal one."""
        return write_yaml(self.config, self.origins, with_defaults=with_defaults)

    def for_ranks(self, world_size: int) -> Resolved:
        """The configuration with `training.train_batch_size` divided over ranks and micro-batches.

        Raises:
            ConfigError: The batch size is not divisible.
        """
        training = self.config.training
        if training.train_batch_size is None:
            return self
        try:
            divided = training.divided(self.config.sharding.num_batches(world_size))
        except ConfigProblems as error:
            raise error.map(lambda p: self.index.locate(p.below("training"))) from None
        return dataclasses.replace(
            self, config=self.config.model_copy(update={"training": divided})
        )

    def is_chosen(self, key: str) -> bool:
        """Whether the user set a value, rather than a default or our configuration."""
        origin = self.origins.get(key)
        return origin is not None and bool(origin.place) and origin.file != self.job

    def check_supported(
        self, *, planning: bool = False, launch: LaunchEnvironment | None = None
    ) -> None:
        """Calls `supported.check_supported` and adds places to its errors."""
        try:
            check_supported(self.config, planning=planning, launch=launch)
        except ConfigProblems as error:
            raise error.map(self.index.locate) from None

    def located(self, error: ErrorT) -> ErrorT | ConfigProblems:
        """Adds the place to an error whose text begins with a key of a file.

        Later checks (missing data, an impossible mesh) use it to name the line.
        """
        if isinstance(error, ConfigProblems):
            return error.map(self.index.locate)
        text = str(error)
        if self.config.model == self.config.teacher:  # a student initialised from its teacher
            text = re.sub(r"\bmodel\.(name_or_path|trust_remote_code)", r"teacher.\1", text)
        key, colon, said = text.partition(": ")
        # The planner knows ShardConfig's names without `sharding.`.
        for full in (key, f"sharding.{key}"):
            at = re.sub(r"\.\d+\..*", "", full)  # items of a list have the place of its key
            origin = self.origins.get(at) or self.index.origin_of(at, is_default=True)
            if colon and origin.place:
                is_theirs = origin.kind is OriginKind.DERIVED  # the file has the other tool's key
                name = origin.written if is_theirs else full
                return type(error)(f"{origin.place}: {name}: {said}")
        return type(error)(f"sharding.{text}") if key in ShardConfig.field_names() else error


# ---- loading


def load_config(
    path: Path | Sequence[Path | File] | None,
    overrides: Sequence[str] = (),
    *,
    needs_model: bool = True,
) -> Resolved:
    """Reads files in any dialect and merges the command line into them.

    Args:
        path: a YAML or JSON file, or several, whose later ones replace keys of earlier ones; some
            may already be read. None: the built-in job of `train`.
        overrides: `a.b.key=value`, or `key=value` where only one key has that name.
        needs_model: False accepts a configuration without a model, to explain it.

    Raises:
        ConfigError: Lists all problems of the input with their places.
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
        present = [canonical(key) for file in files for key in file.origins]
        command_line, problems = _command_line(overrides, present)
        replaced = _replaced_names(command_line.origins)
        for file in files:
            file.remove(replaced)
        files.append(command_line)
        layers += map(Translation, files)
        _check_engines(layers)
        problems += _contradictions(files)
        origins, merged = _merge(files)
    except ConfigProblems as error:  # `${nowhere}`, `???`: without a place
        written = {key: origin for file in files for key, origin in file.origins.items()}
        raise error.map(Origins(written, name).locate) from None
    index = Origins(origins, name)
    problems += [problem for layer in layers for problem in layer.problems]
    problems += map(index.locate, _set_implied(merged))
    is_without_model = False
    if not any(_given(merged.get(name)) for name in ("model", "student")):
        merged.pop("student", None)
        if merged.get("teacher"):  # a student starts as its teacher, or as part of it
            merged["model"] = merged["teacher"]
        elif not needs_model:
            is_without_model, merged["model"] = True, "MODEL"
    try:
        config = RunConfig(**merged)
    except ConfigProblems as error:
        problems += (index.locate(_near(at_home(problem))) for problem in error.problems)
        raise ConfigProblems(problems) from None
    if problems:
        raise ConfigProblems(problems)
    dialects = tuple(layer.dialect or "fullshard" for layer in layers[:-1])
    job = name if files[-2].is_ours else ""
    values_from = _origins(config, index)
    if is_without_model:
        config = config.model_copy(update={"model": ModelConfig.model_construct()})
        values_from["model.name_or_path"] = Origin(OriginKind.MISSING)
    notes = (
        *(_judge(n, index) for one in layers for n in one.notes if _applies(n, values_from)),
        *_idle(config, values_from, job),
    )
    return Resolved(config, values_from, index, notes, dialects, job)


def _given(section: Any) -> bool:
    """Whether a section has a value; one that was written for a missing model has defaults."""
    return any(section.values()) if hasattr(section, "values") else section is not None


def _replaced_names(given: Iterable[str]) -> list[str]:
    """Trainer keys of the command line; a flat file has them without the prefix."""
    keys = [key for key in given if key.partition(".")[2].partition(".")[0] in TRAINING]
    return [*keys, *(key.removeprefix("training.") for key in keys)]


# ---- the command line


def overrides_from_args(args: Sequence[str]) -> list[str]:
    """Converts remaining command-line arguments to `key=value` texts.

    `--max_steps 5`, `--max_steps=5` and `--max-steps 5` are `training.max_steps=5`; a flag with
    nothing behind it (`--bf16`) is true; `key=value` stays.
    """
    overrides: list[str] = []
    waiting: str | None = None
    for arg in args:
        is_flag = arg.startswith("--") and len(arg) > len("--")
        if waiting is not None:
            overrides.append(f"{waiting}={'true' if is_flag else arg}")
            waiting = None
            if not is_flag:
                continue
        if not is_flag:
            overrides.append(arg)
            continue
        name, has_value, value = arg.removeprefix("--").partition("=")
        key = training_or_bare(name)
        if has_value:
            overrides.append(f"{key}={value}")
        else:
            waiting = key
    return [*overrides, f"{waiting}=true"] if waiting is not None else overrides


def _command_line(texts: Sequence[str], present: Sequence[str]) -> tuple[File, list[Problem]]:
    """Returns the command line in the form of a file.

    Args:
        texts: `key=value`, as typed.
        present: The dotted keys of the files.

    Returns:
        The file, and a problem for every text that is not `key=value` or whose key is unknown or
        ambiguous.
    """
    file = File("command line", Path(), {}, {})
    problems: list[Problem] = []
    for text in texts:
        written, has_value, value = text.partition("=")
        if not has_value or not all(written.strip().split(".")):
            advice = "One configuration file comes first, then its overrides"
            problems.append(Problem("", "key=value", repr(text), advice, place="command line"))
            continue
        origin = Origin(OriginKind.COMMAND_LINE, written=written.strip())
        try:
            key = canonical(resolve(written, present))
            # YAML reads empty text as null.
            file.set(key, parse_value(value, key) if value.strip() else value, origin)
        except ConfigProblems as error:
            problems += error.problems
    return file, problems


# ---- merging


def _check_engines(layers: Sequence[Translation]) -> None:
    """Checks that the files do not select two engines.

    Raises:
        ConfigError: Both FSDP and DeepSpeed are selected.
    """
    asked: dict[str, Origin] = {}
    for engine, origin in (one for layer in layers for one in layer.engines):
        asked.setdefault(engine, origin)
    if len(asked) < 2:
        return
    fsdp, deepspeed = asked["FSDP"], asked["DeepSpeed"]
    got = f"DeepSpeed and FSDP, which {fsdp.written} ({fsdp.place}) asks for"
    why = "Both shard the same parameters, so only one can; fullshard runs either file alone"
    problem = Problem(deepspeed.written, "one of FSDP and DeepSpeed", got, why, deepspeed.place)
    raise ConfigProblems([problem])


def _contradictions(files: Sequence[File]) -> list[Problem]:
    """Finds contradictions between a file that a flag names (`--deepspeed ds.json`) and others.

    Neither value was typed, so neither has precedence, as in Hugging Face's Trainer.
    """
    *before, last = files
    said = {
        canonical(key): (find(file.values, key), origin)
        for file in before
        for key, origin in leaves(file.origins).items()
    }
    problems: list[Problem] = []
    for key, origin in last.origins.items():
        value = find(last.values, key)
        other = said.get(canonical(key), (value, origin))
        if origin.file and not agree(key, value, other[0]):
            problems.append(contradiction(key, (value, origin), other))
    return problems


def _merge(files: Sequence[File]) -> tuple[dict[str, Origin], dict[str, Any]]:
    """Merges the origins and values of all files; later files replace keys of earlier ones."""
    first, *later = files
    merged, origins = first.values, first.origins
    for file in later:
        # On the command line `sharding={...}` replaces the section; in a file it is merged.
        given = file.origins if file is files[-1] else leaves(file.origins)
        updates = {canonical(key): (find(file.values, key), given[key]) for key in given}
        replaced = {*updates} | {
            rival
            for name, (value, _) in updates.items()
            for rival in rivals_of(name)
            if _rules_out(name, value, rival, find(merged, rival))
        }
        gone = [key for key in origins if is_below(_full_key(key, merged), replaced)]
        for key in gone:
            del origins[key]
            if updates.get(key, (None,))[0] is None:  # an update keeps the key's position
                drop(merged, key)
        for key, (value, origin) in updates.items():
            if value is None and key in RunConfig.field_names():
                continue  # `training:` with nothing below it, teacher=null
            put(merged, key, value)
            origins[key] = origin
    return origins, interpolated(merged)


def _rules_out(name: str, value: object, rival: str, other: object) -> bool:
    """Whether a value leaves no room for that of a key with the same meaning.

    A value that is still to be chosen does not, nor does one that asks for nothing
    (`bf16=false` next to `fp16: true`), unless the other one asks for the same thing.
    """
    if is_auto(value) or is_auto(other):
        return False
    unasked = (None, *UNASKED.get(name, ()))
    if not any(agree(name, value, nothing) for nothing in unasked):
        return True
    asks = (move.on for move in MOVES if (move.source, move.target) == (name, rival))
    return any(agree(rival, other, on) for on in asks)


def _set_implied(values: dict[str, Any]) -> Iterator[Problem]:
    """Sets the keys that other keys imply; yields the contradictions between the two."""
    for move in MOVES:
        said, other = find(values, move.source), find(values, move.target)
        if not move.stays:
            drop(values, move.source)
        section = move.target.partition(".")[0]
        held = values.get(section)
        if said is None or not (held is None or isinstance(held, dict) or section in PLAIN_KEYS):
            continue  # the schema rejects a section that is not a mapping
        try:
            if other is not None and not _agrees(move, said, other):
                expected = f"the value of {move.target}, {show(other)}"
                yield Problem(move.source, expected, show(said), "Give one of the two")
            elif other is None and (implied := move.implied(said)) is not None:
                put(values, move.target, implied)
        except Rejected:
            continue  # its own field rejects it


def _agrees(move: Move, said: object, other: object) -> bool:
    """Whether a value of a move's source and one of its target have the same meaning."""
    if not move.stays:
        return agree(move.target, said, other)
    is_on = agree(move.target, other, move.on)
    is_off = agree(move.target, other, move.off) if move.off else not is_on
    return to_flag(said) != is_off


def _full_key(key: str, values: Mapping[str, Any]) -> str:
    """Our full name for a key; `model: FOLDER` is model.name_or_path."""
    is_plain = key in PLAIN_KEYS and not isinstance(values.get(key), dict)
    return canonical(f"{key}.{PLAIN_KEYS[key]}" if is_plain else key)


def _near(problem: Problem) -> Problem:
    """Names the nearest key by which files of other tools are recognized."""
    if problem.got != "unknown key" or "." in problem.key or "Did you mean" in problem.advice:
        return problem
    near = did_you_mean(problem.key, [mark for dialect in DIALECTS for mark in dialect.marks])
    return dataclasses.replace(problem, advice=near or problem.advice)


# ---- notes and origins


def _applies(note: Note, origins: Mapping[str, Origin]) -> bool:
    """Whether a note has its key, or another tool's default no key of ours in its place."""
    keys = [key for target in note.targets for key in (target, *rivals_of(target))]
    is_free = all(origins[key] == DEFAULT for key in keys if key in origins)
    return note.status is not Status.NOT_GIVEN or is_free


def _judge(note: Note, index: Origins) -> Note:
    """Updates the notes of keys that another key has replaced."""
    if note.status is Status.NOT_GIVEN:
        return note
    deciding = [
        index.origin_of(target, is_default=False, sources=derived_from(target))
        for target in note.targets
    ]
    is_translated = note.status is Status.TRANSLATED
    if not (deciding if is_translated else any(o.place for o in deciding)):
        return note
    if any((o.place, o.written) == (note.place, note.key) for o in deciding):
        return note
    decides = next((f"{o.written} ({o.place})" for o in deciding if o.place), "another key")
    other = any(o.file and not note.place.startswith(f"{o.file}:") for o in deciding)
    why = f"{decides} decides"
    return dataclasses.replace(note, status=Status.NO_EFFECT, why=why, is_overruled=other)


def _idle(config: RunConfig, origins: Mapping[str, Origin], job: str) -> Iterator[Note]:
    """Notes of the keys that were set, other than by a built-in job, and have no effect."""
    for key, why in idle(config):
        origin = origins.get(key)  # model.config has only the keys that were written
        if origin and origin.place and (not job or origin.file != job):
            section, name = key.split(".", 1)
            part: Section = getattr(config, section)
            known = part.__class__.model_fields.get(name)
            is_asked = known is None or getattr(part, name) != known.default
            yield Note(key, Status.LOST if is_asked else Status.NO_EFFECT, why, origin.place)


def _origins(config: RunConfig, index: Origins) -> dict[str, Origin]:
    """The origin of every value, by dotted key."""
    # model has no default, so any key of it was written
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


# ---- written as YAML, explained, and its JSON Schemas

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_COMMENT_COLUMN = 48
_INDENT = 2


class _Dumper(yaml.SafeDumper):
    """Puts text into quotes that `files` would read as a number (`1e-4`) or a reference (`${`)."""


cast("Any", _Dumper).add_implicit_resolver(
    "tag:yaml.org,2002:float", EXPONENT, list("-+0123456789")
)


def _represented(dumper: Any, text: str) -> yaml.ScalarNode:
    style = None if text.splitlines() == [text] else '"'  # escapes line ends
    return dumper.represent_scalar("tag:yaml.org,2002:str", text.replace("${", "\\${"), style=style)


_Dumper.add_representer(str, _represented)


def write_yaml(
    config: RunConfig, origins: Mapping[str, Origin], *, with_defaults: bool = True
) -> str:
    """Writes the configuration as YAML with origins as comments: a run's config.yaml.

    Unset sections without defaults (teacher, sft ...) are omitted.
    """
    values = {name: value for name, value in config.to_dict().items() if value is not None}
    title = "# Every value of this run, and where it came from."
    shown = set(flatten(values))
    if not with_defaults:
        left_out = {key for key in shown if origins[key].kind is OriginKind.DEFAULT}
        shown -= left_out
        title = f"# Values that were set, and where. --all adds {len(left_out)} defaults."
    return "\n".join([title, *_lines(values, "", origins, shown)]) + "\n"


def _lines(
    values: Mapping[Any, Any], prefix: str, origins: Mapping[str, Origin], shown: Collection[str]
) -> Iterator[str]:
    indent = " " * (_INDENT * (prefix.count(".") + 1 if prefix else 0))
    for name, value in values.items():
        key = join_key(prefix, str(name))
        if isinstance(value, dict) and value:
            inner = list(_lines(cast("dict[Any, Any]", value), key, origins, shown))
            yield from [f"{indent}{_flow(name)}:", *inner] if inner else ()
        elif key in shown:
            text = f"{indent}{_flow(name)}: {_flow(cast('object', value))}"
            yield f"{text:<{_COMMENT_COLUMN}}  # {origins[key]}"


def _flow(value: object) -> str:
    """A value on one line."""
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=float("inf"))
    return text.removesuffix("...\n").rstrip("\n")


def explain(resolved: Resolved) -> dict[str, Any]:
    """Sections by name, each value as `{value, origin}`, and `notes`."""
    return {
        "dialects": list(resolved.dialects),
        **_with_origins(resolved.config.to_dict(), "", resolved.origins),
        "notes": [
            {"key": note.key, "status": note.status, "why": note.why, "place": note.place}
            for note in resolved.notes
        ],
    }


def text_of(resolved: Resolved, *, with_defaults: bool) -> str:
    """The explanation as text: YAML with origins as comments, then one line per note."""
    lines = resolved.to_yaml(with_defaults=with_defaults).splitlines()
    return "\n".join([*lines, *([""] if resolved.notes else []), *map(str, resolved.notes)])


def schema() -> dict[str, Any]:
    """The JSON Schema of a file: every key, also under its other names."""
    made = RunConfig.model_json_schema()
    for name in RunConfig.field_names():
        section = RunConfig.section_of(name)
        if section is None or section.__name__ not in made["$defs"]:
            continue
        properties = made["$defs"][section.__name__]["properties"]
        for alias, key in section.ALIASES.items():
            properties[alias] = copy.deepcopy(properties[key])
    training = made["$defs"]["TrainingConfig"]["properties"]
    for name in (*names(), *MOVED):
        training.setdefault(name, {"description": "See `fullshard config explain`."})
    made["properties"]["strategy"] = {"description": "sharding.strategy"}
    # plain text is a model folder or a data path
    for name in ("model", "data", "teacher"):
        made["properties"][name] = {"anyOf": [{"type": "string"}, made["properties"][name]]}
    return {"$schema": _DRAFT, **made, "title": "A configuration of fullshard"}


def dialect_schema(dialect: Dialect) -> dict[str, Any]:
    """The JSON Schema of another tool's file: its keys and ours."""
    own = schema()
    properties = {**own["properties"], **_keys_of(dialect.table)}
    return {**own, "title": f"A file of {dialect.name}", "properties": properties, "required": []}


def _keys_of(table: Mapping[str, object]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, entry in table.items():
        if isinstance(entry, Mapping):
            inner = _keys_of(cast("Mapping[str, object]", entry))
            found[key] = {"properties": inner}
            # names with a prefix are the same keys: fsdp_offload_params, stage3_max_live_parameters
            prefixed = "|".join(inner)
            found[key]["patternProperties"] = {
                f"^(fsdp_|parallelism_config_|stage3_)({prefixed})$": {}
            }
        elif key:
            found[key] = {}
    return found


def _with_origins(
    values: Mapping[str, Any], prefix: str, origins: Mapping[str, Origin]
) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for name, value in values.items():
        key = join_key(prefix, str(name))
        if isinstance(value, dict) and value:
            shown[str(name)] = _with_origins(cast("dict[str, Any]", value), key, origins)
        else:
            shown[str(name)] = {"value": value, "origin": str(origins.get(key, DEFAULT))}
    return shown
