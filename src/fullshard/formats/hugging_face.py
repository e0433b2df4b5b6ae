"""Hugging Face folders: their files, and the names of a model's tensors in them.

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
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.files import TensorFile
from fullshard.config.regular_files import read_regular
from fullshard.engine.folder import INDEX, ONE_FILE
from fullshard.engine.hugging_face import build_on_meta, read_config
from fullshard.engine.state import DTYPES, as_bytes
from fullshard.errors import CheckpointError, ConfigError, untrusted
from fullshard.formats.source import COMPANIONS, Entry, Source

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


def check_once(known: Collection[str], names: Collection[str], file: Path) -> None:
    """Raises CheckpointError if two files contain the same tensor, which is ambiguous."""
    if twice := sorted({*known} & {*names}):
        raise CheckpointError(
            f"'{file}': expected each tensor in one file; got {twice[0]} in another one too. Copy "
            "the folder again."
        )


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
                return by_model_names(shell, source)
    except CheckpointError as error:
        why = str(error)
    note = f"the names of the model of {CONFIG}, those of the files stay: {why}"
    return replace(source, left_out=(*source.left_out, note))


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
