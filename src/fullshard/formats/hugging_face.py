"""Hugging Face folders: their files, the names of a model's tensors in them, and the export.

    files    ...experts.0.gate_proj.weight   ...experts.0.up_proj.weight   ...experts.1. ...
    model    ...experts.gate_up_proj

transformers 5 joins tensors of files into one tensor of the model when it loads, and cuts them
again when it saves. Both directions use its own table, on a model without storage.
"""

from __future__ import annotations

import copy
import fnmatch
import importlib.util
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.files import TensorFile, sync_folder, write_tensors, write_text
from fullshard.checkpoint.format import ADAPTED
from fullshard.config.regular_files import read_regular
from fullshard.config.values import DType, nearest, parse
from fullshard.engine.engine import Engine
from fullshard.engine.folder import INDEX, ONE_FILE
from fullshard.engine.hugging_face import build_on_meta, read_config
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.state import DTYPES, as_bytes, tied_names
from fullshard.errors import CheckpointError, ConfigError, untrusted
from fullshard.formats.ours import piece_of
from fullshard.formats.source import (
    COMPANIONS,
    Entry,
    Source,
    check_empty,
    check_once,
    whole_or_nothing,
)
from fullshard.transport.base import torch_dtype

CONFIG = "config.json"
Tensors = dict[str, torch.Tensor]
Convert = Callable[[Tensors], Tensors]


def open_safetensors(folder: Path, closing: ExitStack) -> Source:
    """Opens a folder with model.safetensors, or with several files and their index.

    Raises:
        CheckpointError: A file is missing or damaged, or contains a dtype unknown to torch.
    """
    names = files_of(folder, ONE_FILE, INDEX)
    files = {name: closing.enter_context(TensorFile.open(folder / name)) for name in names}
    tensors: dict[str, Entry] = {}
    for file in files.values():
        check_once(tensors, file.entries, file.path)
        tensors |= {name: _entry(file, name) for name in sorted(file.entries)}
    return Source("a Hugging Face folder", tensors, companions=companions_of(folder))


def files_of(folder: Path, one: str, index: str) -> list[str]:
    """The single weights file, or the files in the index.

    Raises:
        CheckpointError: The index cannot be read, or lists a missing file.
    """
    if (folder / one).is_file() or not (folder / index).is_file():  # as transformers does
        return [one]
    with untrusted(folder / index, "an index with a weight_map"):
        table: Any = json.loads(read_regular(folder / index))
        names: list[str] = sorted(set(table["weight_map"].values()))
        strays = [name for name in names if Path(name).name != name]
    for name in names:
        if name in strays or not (folder / name).is_file():
            raise CheckpointError(
                f"{folder / index}: expected the files that it lists; {name} is missing. Copy it."
            )
    return names


def companions_of(folder: Path) -> dict[str, bytes]:
    """Reads the configuration and tokenizer files of a folder.

    Raises:
        CheckpointError: A file is a link out of the folder, other than into the blobs of a Hugging
            Face cache. An export would publish whatever file it points to.
    """
    home = folder.resolve()
    inside = (home, home.parents[1] / "blobs") if home.parent.name == "snapshots" else (home,)
    found: dict[str, bytes] = {}
    for path in sorted(folder.iterdir()):
        if not path.is_file() or not any(fnmatch.fnmatch(path.name, p) for p in COMPANIONS):
            continue
        if path.is_symlink() and path.resolve().parent not in inside:
            raise CheckpointError(
                f"{path}: expected a file of this folder; it is a link to '{path.resolve()}'. "
                "Copy the file here if it belongs to the model."
            )
        found[path.name] = read_regular(path)
    return found


def _entry(file: TensorFile, name: str) -> Entry:
    kind, shape, begin, end = file.entries[name]
    if kind not in DTYPES:
        raise CheckpointError(
            f"{file.path}: expected dtypes among {', '.join(DTYPES)}; {name} has {kind}. "
            "Convert it with the tool that wrote it."
        )

    def read() -> torch.Tensor:
        tensor = torch.empty((end - begin) // DTYPES[kind].itemsize, dtype=DTYPES[kind])
        file.read(name, 0, as_bytes(tensor))
        return tensor.view(shape)

    return Entry(DTYPES[kind], shape, read)


# ---- names in files, and names in the model


def model_of(folder: Path) -> nn.Module | None:
    """Builds the model of a config.json without storage; None if transformers does not know it."""
    if importlib.util.find_spec("transformers") is None:
        return None
    import transformers

    transformers.utils.logging.set_verbosity_error()
    try:
        config = read_config(folder, CONFIG)
        names = getattr(config, "architectures", None) or [""]
        kind: Any = getattr(transformers, str(names[0]), None)
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            with torch.device("meta"):
                return kind(config)
        return build_on_meta(config)
    except ConfigError:
        return None


def with_model_names(source: Source, *others: Source) -> Source:
    """The source under the names of the model of the first config.json, its own or another's.

    If names of files stay although there is one, `left_out` says why.
    """
    configs = [one.companions[CONFIG] for one in (source, *others) if CONFIG in one.companions]
    if not configs:
        return source
    why = "transformers builds no model from it"
    try:
        with untrusted(CONFIG, "that of a known model"), TemporaryDirectory() as folder:
            (Path(folder) / CONFIG).write_bytes(configs[0])
            if (shell := model_of(Path(folder))) is not None:
                return _compared(by_model_names(shell, source), shell)
    except CheckpointError as error:
        why = str(error)
    note = f"the names of the model of {CONFIG}, those of the files stay: {why}"
    return replace(source, left_out=(*source.left_out, note))


def _compared(source: Source, shell: nn.Module) -> Source:
    """The source; `left_out` says what of the model it lacks, and what the model lacks."""
    tied = {**source.tensors, **{n: source.tensors.get(one) for n, one in source.tied.items()}}
    first = {id(param): name for name, param in reversed(list(shell.named_parameters()))}
    notes: list[str] = []
    for name, value in shell.named_parameters():
        entry, shape = tied.get(name) or tied.get(first[id(value)]), tuple(value.shape)
        if entry is None or entry.shape != shape:
            got = f"is {entry.shape} in the files" if entry else "is not in the files"
            notes = [f"a model of {CONFIG} as it is: {name} of shape {shape} {got}"]
            break
    of_model = {name for name, _ in shell.named_parameters(remove_duplicate=False)}
    of_model |= {name for name, _ in shell.named_buffers(remove_duplicate=False)}
    if more := [name for name in source.tensors if name not in of_model]:
        stays = f" and {len(more) - 1} others, which stay" if len(more) > 1 else ", which stays"
        notes.append(f"a model of {CONFIG} as it is: it lacks {more[0]}{stays}")
    return replace(source, left_out=(*source.left_out, *notes))


def by_file_names(shell: nn.Module, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Renames a model's entries to the names in its files, cuts joined ones and joins cut ones.

    Entries that share names in files are converted together, others alone. If that is not what the
    model as a whole gives, its own names are kept, which `from_pretrained` reads too.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4: files have the model's names
        return dict(entries)
    model: Any = shell
    convert: Convert = partial(revert_weight_conversion, model)
    together = _shapes(convert(_without_storage(entries, entries)))
    if together == _shapes(entries):
        return dict(entries)
    groups = dict[frozenset[str], list[str]]()
    for name in entries:
        groups.setdefault(frozenset(convert(_without_storage(entries, [name]))), []).append(name)
    found, kept = dict[str, Entry](), Tensors()
    for names in groups.values():
        found |= _converted(convert, entries, names, kept)
    return found if _shapes(found) == together else dict(entries)


def by_model_names(shell: nn.Module, source: Source) -> Source:
    """Renames tensors of files, tied ones too, to the model's names; joins and cuts them.

    The optimizer's states, whose parameters then have other names or shapes, are left out.
    """
    given = {**source.tensors, **{n: source.tensors[first] for n, first in source.tied.items()}}
    found = _by_model_names(shell, given)
    if found == given:
        return source
    first = dict[int, str]()
    tied = {name: first.setdefault(id(entry), name) for name, entry in found.items()}
    tied = {name: one for name, one in tied.items() if name != one}
    tensors = {name: found[name] for name in first.values()}
    left = source.left_out
    if source.optimizer is not None:
        left += (f"the states of {source.optimizer.kind}, under the names and shapes of files",)
    return replace(source, tensors=tensors, tied=tied, optimizer=None, left_out=left)


def _by_model_names(shell: nn.Module, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """An entry that is no part of the model keeps its name, as do parts that form no tensor."""
    own = shell.state_dict()
    shapes = _shapes(own)
    try:
        from transformers import conversion_mapping
        from transformers import core_model_loading as loading
    except ImportError:
        return dict(entries)
    if _shapes(entries).items() <= shapes.items():
        return dict(entries)
    model: Any = shell
    rules = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    of_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    parts = dict[str, dict[str, Any]]()  # by the model's name: the file's, and a pattern or None
    for name in sorted(entries, key=loading.dot_natural_key):
        renamed = (
            loading.rename_source_key(name, *tables, model.base_model_prefix, own)
            for tables in ((renamings, converters), ([], []))
        )
        target, pattern = next((one for one in renamed if one[0] in own), (name, None))
        parts.setdefault(target, {})[name] = pattern
    found, kept = dict[str, Entry](), Tensors()
    for target, names in parts.items():
        rule = None if None in names.values() else of_pattern[next(iter(names.values()))]
        joined = dict[str, Entry]()
        with suppress(CheckpointError), untrusted(target, "parts that form a tensor"):
            join = partial(_join, model, rule, target, names)
            joined = _converted(join, entries, names, kept) if rule else {}
        if joined and _shapes(joined).items() <= shapes.items():
            found |= joined
        else:
            found |= {target if len(names) == 1 and not rule else n: entries[n] for n in names}
    return found


def _join(model: Any, rule: Any, target: str, names: dict[str, Any], parts: Tensors) -> Tensors:
    """Applies a rule of transformers to the tensors of files that form a tensor of the model."""
    rule = copy.deepcopy(rule)
    for name, pattern in names.items():
        rule.add_tensor(target, name, pattern, parts[name])
    made = rule.convert(target, model=model, config=model.config)
    return {name: found[0] if isinstance(found, list) else found for name, found in made.items()}


def _converted(
    convert: Convert, entries: Mapping[str, Entry], names: Iterable[str], kept: Tensors
) -> dict[str, Entry]:
    """The converted entries; results are kept until read, or until others are converted."""

    def read(part: str) -> torch.Tensor:
        if part not in kept:
            kept.clear()
            kept.update(convert({name: entries[name].read() for name in names}))
        return kept.pop(part)

    made = convert(_without_storage(entries, names))
    return {n: Entry(v.dtype, tuple(v.shape), partial(read, n)) for n, v in made.items()}


def _shapes(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _without_storage(entries: Mapping[str, Entry], names: Iterable[str]) -> Tensors:
    return {name: entries[name].without_storage() for name in names}


# ---- export --------------------------------------------------------------------------------------
# Writes a source, or a sharded model, as a folder that `from_pretrained` opens:
#   tensors by the model's names ---> by the names of files ---> model-00001-of-00003.safetensors
#                                     (experts one by one)      model.safetensors.index.json
#
# transformers gives the names in files, from a model without storage. Files are written one tensor
# at a time, in a temporary folder that is renamed once it is complete.

GENERATION = "generation_config.json"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class Format(StrEnum):
    """Format of an exported folder."""

    HUGGING_FACE = "hf"
    DCP = "dcp"


@dataclass(frozen=True)
class ExportSettings:
    """How a folder is written.

    Attributes:
        dtype: Dtype of floating point tensors; None keeps each tensor's own.
        max_shard_bytes: Maximum size of a file with more than one tensor.
        on_bytes: Called with the number of bytes after each write.
        writes: Whether this process writes the file of this number. It reads the tensors of the
            other files too, because reading may be a collective.
        format: Format of the folder.
    """

    dtype: torch.dtype | None = None
    max_shard_bytes: int = 5 * 10**9
    on_bytes: Callable[[int], None] = lambda _count: None
    writes: Callable[[int], bool] = lambda _file: True
    format: Format = Format.HUGGING_FACE

    @classmethod
    def of(
        cls,
        format_: str,
        dtype: str | None,
        max_shard_size: str | None,
        config: Path | None = None,
    ) -> ExportSettings:
        """Parses the options of `ckpt export`.

        Raises:
            ConfigError: An option is unknown, or has no effect.
        """
        known = None if dtype is None else torch_dtype(parse(DType, dtype, "--dtype"))
        if format_ not in list(Format):
            raise ConfigError(f"--format: expected {' or '.join(Format)}; got '{format_}'.")
        for option, given in {"--max-shard-size": max_shard_size, "--config": config}.items():
            if format_ == Format.DCP and given is not None:
                raise ConfigError(
                    f"{option}: expected --format hf, got dcp, which has one file per tensor and "
                    f"no configuration. Remove {option}."
                )
        return cls(known, parse_size(max_shard_size or "5GB"), format=Format(format_))


def parse_size(text: str) -> int:
    """Parses "5GB" (5e9 bytes, as in Hugging Face), "500MiB" or "1000".

    Raises:
        ConfigError: The text is not a size.
    """
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d*)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match.group(2).upper()) if match else None
    size = int(float(match.group(1)) * unit) if match and unit else 0
    if size <= 0:
        raise ConfigError(f"--max-shard-size: expected a size such as 5GB or 500MiB; got '{text}'.")
    return size


def export_folder(
    source: Source, folder: Path, settings: ExportSettings, *, dry_run: bool = False
) -> list[str]:
    """Write a source as a folder; return notes on contents that were left out.

    A dry run checks the same, and writes nothing.

    Raises:
        CheckpointError: The source has no config.json, its tensors differ from that model's, or the
            folder cannot be written.
    """
    if settings.format is Format.DCP:
        from fullshard.formats.dcp import write_dcp  # the import takes half a second

        check_empty(folder, "export")
        if dry_run:
            return list(source.left_out)
        return write_dcp(source, folder, settings.dtype, settings.on_bytes)
    if CONFIG not in source.companions:
        raise CheckpointError(
            f"export: expected {source.what} with {CONFIG}, which describes the model; it has "
            "none. Pass a folder with one: --config FOLDER."
        )
    check_empty(folder, "export")
    with TemporaryDirectory() if dry_run else whole_or_nothing(folder) as place:
        aside = Path(place)
        for name, data in source.companions.items():
            (aside / name).write_bytes(data)
        notes = _named(source, aside)[2] if dry_run else write_model(source, aside, settings)
        source.check()
    return [*source.left_out, *notes]


def write_model(source: Source, folder: Path, settings: ExportSettings) -> list[str]:
    """Writes weights into a folder with config.json, and sets their dtype there."""
    shell, named, left = _named(source, folder)
    named = {name: entry.cast(settings.dtype) for name, entry in named.items()}
    complete_config(folder, shell, named)
    write_weights(named, folder, settings)
    return left


def _named(source: Source, folder: Path) -> tuple[nn.Module | None, dict[str, Entry], list[str]]:
    """The model of the folder's config.json, and what `as_files_have` returns."""
    with untrusted(folder / CONFIG, "the configuration of a model"):
        shell = model_of(folder)
        if shell is None:
            left = ["transformers does not know this model: tensors keep their names"]
            return shell, dict(source.tensors), left
        return shell, *as_files_have(source, shell)


def as_files_have(source: Source, shell: nn.Module) -> tuple[dict[str, Entry], list[str]]:
    """The model's tensors under their names in files, and a list of what else the source contains.

    Raises:
        CheckpointError: A tensor is missing, or has another shape.
    """
    named, left = _as_the_model_has(by_model_names(shell, source), shell)
    return by_file_names(shell, named), left


def write_weights(
    entries: Mapping[str, Entry], folder: Path, settings: ExportSettings
) -> list[str]:
    """Writes tensors into files of limited size; returns the files written by this process.

    Raises:
        OSError: The disk is full; raised after every tensor was read, which is a collective.
    """
    files = split(entries, settings.max_shard_bytes)
    written: list[str] = []
    problem: OSError | None = None
    for at, (file, names) in enumerate(files.items()):
        reads = (entries[name].read() for name in names)  # files are written in order
        if settings.writes(at) and problem is None:
            load = partial(next, reads)
            pieces = [
                piece_of(f"model/{name}", replace(entries[name], load=load), settings.on_bytes)
                for name in names
            ]
            try:
                write_tensors(folder / file, pieces, 0)
                written.append(file)
            except OSError as error:
                problem = error
        deque(reads, maxlen=0)
    if problem is not None:
        raise problem
    if settings.writes(0) and list(files) != [ONE_FILE]:
        where = {name: file for file, names in files.items() for name in names}
        total = sum(entry.num_bytes for entry in entries.values())
        table = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        write_text(folder / INDEX, json.dumps(table, indent=2) + "\n")
    return written


def split(entries: Mapping[str, Entry], max_bytes: int) -> dict[str, list[str]]:
    """Names of tensors by file, in their order."""
    parts, size = [list[str]()], 0
    for name, entry in entries.items():
        if parts[-1] and size + entry.num_bytes > max_bytes:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += entry.num_bytes
    if len(parts) == 1:
        return {ONE_FILE: parts[0]}
    count = len(parts)
    return {f"model-{at:05d}-of-{count:05d}.safetensors": part for at, part in enumerate(parts, 1)}


def _as_the_model_has(source: Source, shell: nn.Module) -> tuple[dict[str, Entry], list[str]]:
    """The model's tensors, tied ones once, and the source's other contents.

    Raises:
        CheckpointError: One is missing or has another shape; the configuration is of another model.
    """
    first = {id(param): name for name, param in reversed(list(shell.named_parameters()))}
    ignored: Iterable[str] = getattr(shell, "_keys_to_ignore_on_save", None) or ()
    found: dict[str, Entry] = {}
    for name, value in shell.state_dict(keep_vars=True).items():
        if first.get(id(value), name) != name or name in ignored:
            continue
        entry = source.tensors.get(name) or source.tensors.get(source.tied.get(name, name))
        if entry is None or entry.shape != tuple(value.shape):
            close = nearest(name, sorted({*source.tensors} - {*shell.state_dict()})) or ""
            got = entry.shape if entry else f"none{f', but {close}' if close else ''}"
            cure = "Copy all of its files, or pass its configuration's folder: --config FOLDER."
            if ADAPTED in close:
                cure = "It has adapters: use model/ or adapter/ of the finished run with lora."
            raise CheckpointError(
                f"export: expected {name} of shape {tuple(value.shape)}, as the model of {CONFIG} "
                f"has it; {source.what} has {got}. {cure}"
            )
        found[name] = entry
    every = set(found)
    for name, param in shell.named_parameters(remove_duplicate=False):
        every.add(name)
        twin, own = source.tensors.get(name), found.get(first[id(param)])
        if twin and own and twin is not own and not torch.equal(twin.read(), own.read()):
            raise CheckpointError(
                f"export: expected {name} to equal {first[id(param)]}, to which the model of "
                f"{CONFIG} ties it; they differ. Correct tie_word_embeddings there."
            )
    left = [f"{name}, which is not in the model" for name in source.tensors if name not in every]
    return found, left


def complete_config(folder: Path, shell: nn.Module | None, named: Mapping[str, Entry]) -> None:
    """Sets the dtype in config.json to that of the weights, because readers load in that dtype."""
    with untrusted(folder / CONFIG, "the configuration of a model"):
        config: dict[str, Any] = dict(json.loads((folder / CONFIG).read_bytes()))
    dtypes = [entry.dtype for entry in named.values() if entry.dtype.is_floating_point]
    if dtypes:
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        config[key] = str(dtypes[0]).removeprefix("torch.")
    if shell is not None:
        config["architectures"] = [type(shell).__name__]
        settings: Any = getattr(shell, "generation_config", None)
        if settings is not None and not (folder / GENERATION).is_file():
            settings.save_pretrained(folder)
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def live_source(model: nn.Module) -> Source:
    """The tensors of a sharded model. Reading an entry is a collective."""
    tied = tied_names(model)
    return Source(
        what="this model",
        tensors={
            name: _live_entry(value)
            for name, value in model.state_dict(keep_vars=True).items()
            if name not in tied and isinstance(value, torch.Tensor)
        },
        tied=tied,
    )


def _live_entry(value: torch.Tensor) -> Entry:
    if not isinstance(value, ShardedParameter):
        return Entry(value.dtype, tuple(value.shape), lambda: value.detach().cpu())
    return Entry(value.dtype, tuple(value.record.shape), partial(_gathered, value))


def _gathered(param: ShardedParameter) -> torch.Tensor:
    with torch.no_grad():
        return param.full_tensor().detach().cpu()


def export_together(
    engine: Engine, source: Source, shell: nn.Module, folder: Path, max_shard_bytes: int
) -> list[str]:
    """Writes the weights of a sharded model; the ranks that see the folder write files in turn.

    Each rank stores at most one full tensor. A collective.

    Args:
        engine: Engine of the model.
        source: Its tensors.
        shell: The model without storage.
        folder: Folder with config.json, if this rank can access it.
        max_shard_bytes: Maximum size of a file with more than one tensor.

    Returns:
        The files that this rank wrote.

    Raises:
        CheckpointError: On every rank, if one cannot write.
    """
    named, _ = as_files_have(source, shell)
    sees = engine.all_values(folder.is_dir())
    writers = [rank for rank, there in enumerate(sees) if there]
    settings = ExportSettings(
        max_shard_bytes=max_shard_bytes,
        writes=lambda file: writers[file % len(writers)] == engine.rank,
    )
    written = engine.agree(partial(write_weights, named, folder, settings))

    def complete() -> None:
        if engine.rank == writers[0]:
            complete_config(folder, shell, named)
            sync_folder(folder)

    engine.agree(complete)
    return written
