"""Detects the format of a path by its files.

COMPLETE.json, step-*, checkpoints/       ours
model.safetensors, its index              a Hugging Face folder
pytorch_model.bin, its index              the same, older
pytorch_model_fsdp_0/, optimizer_0/       Accelerate, sharded     (also inside a Trainer's folder)
pytorch_model_fsdp.bin                    Accelerate, whole
.metadata, *.distcp                       torch.distributed.checkpoint
_METADATA                                 orbax
model_world_size_N_rank_R.pt              sharded state dicts of ranks
mp_rank_00_model_states.pt, latest        DeepSpeed
"""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from fullshard.checkpoint.format import natural
from fullshard.checkpoint.retain import candidates, newest_complete
from fullshard.config.regular_files import read_regular
from fullshard.engine.folder import INDEX, ONE_FILE, size_and_time
from fullshard.errors import CheckpointError, ConfigError, untrusted
from fullshard.formats import orbax
from fullshard.formats.deepspeed import open_deepspeed, steps_folder
from fullshard.formats.hugging_face import companions_of, files_of, open_safetensors
from fullshard.formats.ours import open_checkpoint
from fullshard.formats.source import Source
from fullshard.formats.state_dicts import RANK_FILE, open_pickled, open_rank_files

BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
FSDP_FOLDER, FSDP_OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
FSDP_BIN = "pytorch_model_fsdp.bin"
# Weights of each format, in the order in which `_open_other` looks for them.
FORMATS = (ONE_FILE, INDEX), (BIN, BIN_INDEX), (FSDP_BIN,), ("model_world_size_*",), ("latest",)
FORMATS += (".metadata",), (FSDP_FOLDER,), (orbax.METADATA,)
WEIGHTS = (".safetensors", ".bin", ".pt", ".distcp", ".ocdbt")  # suffixes of files with tensors
# Files of a Trainer's checkpoint: its step, and files that are not imported.
TRAINER_STATE, TRAINERS = "trainer_state.json", ("optimizer.pt", "scheduler.pt", "rng_state*.pth")
NOT_READ = {*TRAINERS, "training_args.bin"}
# Folders in which tools put config.json and the tokenizer.
BESIDE = ("", "huggingface", "..")


@contextmanager
def open_source(path: Path, config: Path | None = None) -> Generator[Source]:
    """Opens a path of any known format, with the configuration to export.

    Args:
        path: Path of a checkpoint of any tool.
        config: Folder with config.json and tokenizer; None: those of the path itself.

    Raises:
        ConfigError: `config` has no config.json.
        CheckpointError: The format is unknown, or it cannot be read; at the end of the block: it
            was written again while it was read.
    """
    if config is not None and not (config / "config.json").is_file():
        raise ConfigError(f"--config: expected a folder with config.json; got '{config}'.")
    given = {} if config is None else companions_of(config)
    with ExitStack() as closing:
        if _is_ours(path):
            source = closing.enter_context(open_checkpoint(newest_complete(path, warns=True)))
            yield _with(source, given)
            return
        with untrusted(f"'{path}'", "a checkpoint of a known tool"):
            check = partial(_check_stay, _weights_in(path))
            source = _open_other(path, closing)
            if not source.companions and path.is_dir():
                folders = (path / name for name in BESIDE)
                found = (companions_of(folder) for folder in folders if folder.is_dir())
                files = next((files for files in found if "config.json" in files), {})
                source = replace(source, companions=files)
            _check_whole(path, source)
            names = [next((n for n in format_ if any(path.glob(n))), "") for format_ in FORMATS]
            left = [f"{n}, of another format" for n in [n for n in names if n][1:]]
            left += [f"{n}, of the Trainer" for n in TRAINERS if any(path.glob(n))]
            left += [f"{n.name}, not merged" for n in sorted(path.glob("adapter_model.*"))]
            source = replace(source, left_out=(*source.left_out, *left))
            if source.step is None and (path / TRAINER_STATE).is_file():
                state = json.loads(read_regular(path / TRAINER_STATE))
                source = replace(source, step=state["global_step"])
            if source.step is not None:
                natural(source.step)
        tensors = {n: replace(e, origin=f"'{path}': {n}") for n, e in source.tensors.items()}
        yield _with(replace(source, tensors=tensors, check=check), given)
        check()


_OF_FILES = {"architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path"}


def _with(source: Source, given: dict[str, bytes]) -> Source:
    """The source with other companions, and a note on each setting that they change."""
    if not given:
        return source  # whose config.json may be of any tool
    with untrusted("config.json", "the configuration of a model"):
        own, other = (
            dict(json.loads(files.get("config.json", "{}"))) for files in (source.companions, given)
        )
    keys = sorted(own.keys() & other.keys() - _OF_FILES)
    notes = [f"{k} {own[k]}: --config has {other[k]}" for k in keys if own[k] != other[k]]
    return replace(source, companions=given, left_out=(*source.left_out, *notes))


def _weights_in(path: Path) -> dict[Path, tuple[int, int] | None]:
    """Size and time of each file with tensors, which change when it is written again."""
    if path.is_file():
        return {path: size_and_time(path)}
    folders = (path, *(one for one in path.iterdir() if not one.name.startswith("checkpoint-")))
    files = (file for one in folders for file in one.glob("*") if file.suffix in WEIGHTS)
    return {file: size_and_time(file) for file in files if file.name not in NOT_READ}


def _check_stay(known: dict[Path, tuple[int, int] | None]) -> None:
    """Raises CheckpointError if a file was written again; two saves would be read as one."""
    for file, was in known.items():
        if size_and_time(file) not in (was, None):
            raise CheckpointError(
                f"'{file}': expected it to stay unchanged while it is read; it was written again. "
                "Read it again once the program that writes it has ended."
            )


def _check_whole(path: Path, source: Source) -> None:
    """Raises CheckpointError without any tensor, or without one that the index in use lists."""
    index = next((i for one, i in FORMATS[:2] if any((path / n).is_file() for n in (one, i))), "")
    listed: list[str] = []
    if (path / index).is_file() and not (path / index.removesuffix(".index.json")).is_file():
        listed = list(json.loads(read_regular(path / index))["weight_map"])
    lost = [name for name in listed if name not in source.tensors]
    if lost or not source.tensors:
        raise CheckpointError(
            f"'{path / index}': expected {lost[0] if lost else 'tensors'} in the files; it has "
            "none. Copy all files of one save."
        )


def _open_other(path: Path, closing: ExitStack) -> Source:
    if (path / ONE_FILE).is_file() or (path / INDEX).is_file():
        return open_safetensors(path, closing)
    if (path / BIN).is_file() or (path / BIN_INDEX).is_file():
        files = [path / name for name in files_of(path, BIN, BIN_INDEX)]
        return open_pickled(files, "a Hugging Face folder")
    if (path / FSDP_BIN).is_file():
        source = open_pickled([path / FSDP_BIN], "Accelerate's whole state dict")
        left = ("the optimizer's states",) if (path / "optimizer.bin").is_file() else ()
        return replace(source, left_out=source.left_out + left)
    if path.is_file():
        return open_pickled([path], "a state dict")
    if not path.is_dir():
        raise CheckpointError(f"'{path}': expected a checkpoint, got no file and no folder.")
    if (path / orbax.METADATA).is_file():
        return orbax.open_orbax(path)
    if any(RANK_FILE.fullmatch(entry.name) for entry in path.iterdir()):
        return open_rank_files(path)
    deepspeed = steps_folder(path)
    if deepspeed is not None:
        return open_deepspeed(deepspeed)
    return _open_dcp(path)


def _open_dcp(path: Path) -> Source:
    from fullshard.formats import dcp  # imports torch.distributed.checkpoint: half a second

    if (path / dcp.METADATA).is_file():
        return dcp.open_dcp(path)
    if (path / FSDP_FOLDER / dcp.METADATA).is_file():
        source = dcp.open_dcp(path / FSDP_FOLDER)
        if not (path / FSDP_OPTIMIZER / dcp.METADATA).is_file():
            return source
        optimizer = dcp.optimizer_folder(path / FSDP_OPTIMIZER, source.tensors)
        left = () if optimizer is not None else ("the optimizer's states",)
        return replace(source, optimizer=optimizer, left_out=source.left_out + left)
    raise CheckpointError(
        f"'{path}': expected a checkpoint, a Hugging Face folder, a folder of Accelerate, "
        "torch.distributed.checkpoint, orbax, DeepSpeed (ZeRO) or of "
        "model_world_size_N_rank_R.pt; got a folder with none. Pass the folder with weights."
    )


def _is_ours(path: Path) -> bool:
    with suppress(CheckpointError):
        return bool(candidates(path))
    return False
