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
Convert = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


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
                f"{folder / index}: expected its files beside it; {name} is not there. Copy it too."
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


def with_model_names(source: Source) -> Source:
    """The source with tensors under the names of the model of its config.json, if it has one."""
    with suppress(CheckpointError), untrusted(source.what, "the files of a known model"):
        with TemporaryDirectory() as folder:
            (Path(folder) / CONFIG).write_bytes(source.companions[CONFIG])
            shell = model_of(Path(folder))
        if shell is not None:
            return replace(source, tensors=by_model_names(shell, source.tensors))
    return source


def by_file_names(shell: nn.Module, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Renames a model's entries to the names in its files, and cuts joined ones.

    Each entry is converted by itself. If a conversion needs several at once, the model's own names
    are kept, which `from_pretrained` reads too.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4: files have the model's names
        return dict(entries)
    model: Any = shell
    convert: Convert = partial(revert_weight_conversion, model)
    together = convert(_without_storage(entries, entries))
    if together.keys() == entries.keys():
        return dict(entries)
    found = dict[str, Entry]()
    for name in entries:
        found |= _converted(convert, entries, [name])
    return found if found.keys() == together.keys() else dict(entries)


def by_model_names(shell: nn.Module, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Renames entries of files to the model's names, and joins the parts of a tensor.

    An entry that is no part of the model keeps its name, as do parts that do not form its tensor.
    """
    own = shell.state_dict()
    try:
        from transformers import conversion_mapping
        from transformers import core_model_loading as loading
    except ImportError:
        return dict(entries)
    if entries.keys() <= own.keys():
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
    found = dict[str, Entry]()
    for target, names in parts.items():
        rule = None if None in names.values() else of_pattern[next(iter(names.values()))]
        join = partial(_join, model, rule, target, names)
        joined = _converted(join, entries, names) if rule else {}
        if joined and all(n in own and e.shape == tuple(own[n].shape) for n, e in joined.items()):
            found |= joined
        else:
            found |= {target if len(names) == 1 and not rule else n: entries[n] for n in names}
    return found


def _join(
    model: Any, rule: Any, target: str, names: Mapping[str, str], tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Applies a rule of transformers to the tensors of files that form a tensor of the model."""
    rule = copy.deepcopy(rule)
    for name, pattern in names.items():
        rule.add_tensor(target, name, pattern, tensors[name])
    made = rule.convert(target, model=model, config=model.config)
    return {name: found[0] if isinstance(found, list) else found for name, found in made.items()}


def _converted(
    convert: Convert, entries: Mapping[str, Entry], names: Iterable[str]
) -> dict[str, Entry]:
    """What becomes of some entries; all results are kept from the first read until theirs."""
    kept = dict[str, torch.Tensor]()

    def read(part: str) -> torch.Tensor:
        if part not in kept:
            kept.update(convert({name: entries[name].read() for name in names}))
        return kept.pop(part)

    made = convert(_without_storage(entries, names))
    return {n: Entry(v.dtype, tuple(v.shape), partial(read, n)) for n, v in made.items()}


def _without_storage(entries: Mapping[str, Entry], names: Iterable[str]) -> dict[str, torch.Tensor]:
    meta = partial(torch.empty, device="meta")
    return {name: meta(entries[name].shape, dtype=entries[name].dtype) for name in names}
