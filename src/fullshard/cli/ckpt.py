"""`fullshard ckpt`: lists, inspects, verifies, converts and prunes checkpoints."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator
from dataclasses import asdict, replace
from os.path import realpath
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullshard.cli.arguments import DryRunFlag
from fullshard.cli.outcome import Outcome, print_table, show
from fullshard.errors import CheckpointError, ConfigError, VerifyError, untrusted

if TYPE_CHECKING:
    from fullshard.checkpoint.retain import Found

app = typer.Typer(
    no_args_is_help=True, help="List, inspect, verify, convert and prune checkpoints."
)


def _named(path: Path) -> Path:
    """Return the path, or raise an error before torch is imported if it does not exist."""
    from fullshard.checkpoint.retain import candidates

    with untrusted(f"'{path}'", "a checkpoint"):
        if not path.exists():
            candidates(path)
    return path


def _outside(ctx: typer.Context, folder: Path) -> Path:
    """Check the folder to write: inside a checkpoint it could be pruned, or be taken for one."""
    from fullshard.checkpoint.retain import checkpoints_in, look_at
    from fullshard.checkpoint.storage import StorePath, storage_path
    from fullshard.launch.run_lock import LOCK, held_elsewhere, is_held

    if isinstance(storage_path(folder), StorePath):
        raise CheckpointError(
            f"FOLDER: expected a local folder, got '{storage_path(folder)}'. Write a folder "
            "here and copy it there."
        )
    real = Path(realpath(folder))
    within = next((place for place in real.parents if look_at(place).manifest), None)
    if ctx.info_name == "export" and real.name.startswith("step-") and checkpoints_in(real.parent):
        within = real.parent
    if within is not None:
        raise CheckpointError(
            f"FOLDER: expected a folder outside of checkpoints, got '{folder}' in '{within}', from "
            "which it may be pruned. Write to another folder, such as "
            f"'{within}-{ctx.info_name}'."
        )
    if ctx.info_name == "import" and real.name.startswith("step-"):
        for run in (place for place in real.parents if (place / LOCK).exists() and is_held(place)):
            raise held_elsewhere(run, "FOLDER")  # it would take the folder for its newest save
        if is_held(real.parent):
            raise ConfigError(
                f"FOLDER: expected a folder to which nobody saves, got '{folder}' in "
                f"'{real.parent}', where a process saves its steps. Use another folder, or stop it."
            )
    return folder


@contextlib.contextmanager
def _claimed(folder: Path) -> Generator[None]:
    """Lock the run and the folder of steps to which an import adds one: none begins meanwhile."""
    from fullshard.launch.run_lock import LOCK, RunLock
    from fullshard.run.folder import RunFolder
    from fullshard.saving import SAVES

    real = Path(realpath(folder))
    with contextlib.ExitStack() as held:
        if real.name.startswith("step-"):
            # another tool may have a `.lock` of its own
            runs = [p for p in real.parents if (p / LOCK).exists() and RunFolder(p).record.exists()]
            for run in runs:
                held.enter_context(RunLock(run, "FOLDER"))
            if real.parent not in runs:  # which is locked
                SAVES.claim_folder(real.parent)
        yield


Folder = Annotated[Path, typer.Argument(help="A run's folder, or a folder of step-* folders.")]
NEWEST = "A checkpoint. A run's folder, or a folder of checkpoints, means its newest one."
Target = Annotated[Path, typer.Argument(callback=_outside)]
Any_ = Annotated[Path, typer.Argument(callback=_named, help=NEWEST)]


ConfigFolder = Annotated[
    Path | None,
    typer.Option(help="Folder with config.json and a tokenizer, for a checkpoint without them."),
]


@app.command()
def ls(folder: Folder) -> Outcome:
    """List a folder's checkpoints, newest first, and say why incomplete ones are incomplete."""
    from fullshard.checkpoint.retain import candidates

    found = candidates(folder)
    print_table(
        ("step", "bytes", "checkpoint", ""),
        [
            (
                "" if entry.step is None else str(entry.step),
                _bytes(entry.num_bytes) if entry.num_bytes else "",
                str(entry.path),
                "complete"
                if entry.manifest
                else f"{'NOT OURS' if entry.is_foreign else 'NOT COMPLETE'}: {entry.why}",
            )
            for entry in found
        ],
    )
    newest = next((entry.path for entry in found if entry.manifest), None)
    return Outcome({"newest": newest, "checkpoints": [_facts(entry) for entry in found]})


@app.command()
def inspect(checkpoint: Any_) -> Outcome:
    """Show a checkpoint's tensors, optimizer states, step, number of ranks and data position."""
    from fullshard.checkpoint.read import Checkpoint, facts_of
    from fullshard.checkpoint.retain import newest_complete

    with Checkpoint.open(newest_complete(checkpoint, warns=True)) as opened:
        facts = facts_of(opened)
    show(facts["path"])
    print_table(
        ("tensor", "dtype", "shape", "slices", "bytes"),
        [
            (
                f"{row['name']}{' (one per rank)' if row['opaque'] else ''}",
                row["dtype"],
                " x ".join(map(str, row["shape"])) or "scalar",
                str(row["num_slices"]),
                _bytes(row["num_bytes"]),
            )
            for row in facts["tensors"]
            if row["kind"] == "model"
        ],
    )
    show()
    for name, text in _about(facts):
        show(f"{name:<12} {text}")
    return Outcome(facts)


@app.command()
def verify(checkpoint: Any_) -> Outcome:
    """Read every byte and compare checksums; name damaged files and their tensors."""
    from fullshard.checkpoint.read import find_damage
    from fullshard.checkpoint.retain import candidates, newest_complete

    found = newest_complete(checkpoint, warns=True)
    newest = next((entry for entry in candidates(checkpoint) if not entry.is_leftover), found)
    with _progress("verify", found.num_bytes) as advance:
        damages = find_damage(found, advance)
    for damage in damages:
        tensors = ", ".join(damage.tensors) or "no tensor: text or padding"
        show(f"DAMAGED  {found.path / damage.file}: {damage.why} ({tensors})")
    result = {**_facts(found), "damaged": [asdict(damage) for damage in damages]}
    if damages:
        return Outcome(result, CheckpointError.exit_code)
    if newest.manifest is None:
        show(f"DAMAGED  {newest.path}: {newest.why}; {found.path.name} is whole")
        return Outcome(result, CheckpointError.exit_code)
    show(f"WHOLE  {found.path}: {_bytes(found.num_bytes)}, all checksums match")
    return Outcome(result)


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(callback=_named)],
    b: Annotated[Path, typer.Argument(callback=_named)],
) -> Outcome:
    """Compare two checkpoints tensor by tensor; the exit code is 8 if they differ.

    Args:
        a: A checkpoint or a Hugging Face folder.
        b: The checkpoint or folder to compare it with.
    """
    from fullshard.formats.detect import open_source
    from fullshard.formats.hugging_face import with_model_names
    from fullshard.formats.source import Match, Row, compare

    with open_source(a) as one, open_source(b) as other:
        if one.tensors.keys() != other.tensors.keys():  # one may be the model's own files
            one, other = with_model_names(one, other), with_model_names(other, one)
        with _progress("compare", len(one.tensors)) as advance:
            rows = list[Row]()
            for row in compare(one, other):
                rows.append(row)
                advance(1)
    differ = [row for row in rows if row.verdict is not Match.SAME]
    if differ:
        print_table(
            ("tensor", "", "max difference", ""),
            [
                (r.name, r.verdict, "" if r.max_abs is None else f"{r.max_abs:.3g}", r.about)
                for r in differ
            ],
        )
    show(f"{len(rows) - len(differ)} of {len(rows)} are the same in A ('{a}') and B ('{b}')")
    for what, source in (("A", one), ("B", other)):
        if source.optimizer is not None and None in (one.optimizer, other.optimizer):
            show(f"only {what} has an optimizer ({source.optimizer.kind}): not compared")
    result = {
        "equal": not differ,
        "num_equal": len(rows) - len(differ),
        "rows": [
            asdict(row) | ({"max_abs": "inf"} if row.max_abs == math.inf else {}) for row in differ
        ],
    }
    return Outcome(result, VerifyError.exit_code if differ else 0)


@app.command()
def export(  # noqa: PLR0913  (one parameter an option)
    checkpoint: Any_,
    folder: Target,
    dtype: str | None = None,
    max_shard_size: Annotated[
        str | None, typer.Option("--max-shard-size", "--max_shard_size")
    ] = None,
    format_: Annotated[str, typer.Option("--format")] = "hf",
    config: ConfigFolder = None,
    dry_run: DryRunFlag = False,
) -> Outcome:
    """Write a checkpoint as a folder for `from_pretrained`, or for torch's dcp.load.

    Args:
        checkpoint: see `Any_`.
        folder: Folder to create.
        dtype: Dtype of floating-point tensors: bf16, fp16 or fp32. Default: unchanged.
        max_shard_size: Maximum size of a weights file, with --format hf. Default: 5GB.
        format_: hf: a Hugging Face folder; dcp: torch's distributed checkpoint.
        config: see `ConfigFolder`.
        dry_run: see `DryRunFlag`.
    """
    from fullshard.formats.detect import open_source
    from fullshard.formats.hugging_face import ExportSettings, export_folder

    settings = ExportSettings.of(format_, dtype, max_shard_size, config)
    with open_source(checkpoint, config) as source:
        show(f"{source.what}: {len(source.tensors)} tensors, {_bytes(source.num_bytes)}")
        facts = {"source": source.what, "folder": folder, "num_tensors": len(source.tensors)}
        if dry_run:
            return Outcome(
                {**facts, "left_out": export_folder(source, folder, settings, dry_run=True)}
            )
        with _progress("export", source.num_bytes) as advance:
            notes = export_folder(source, folder, replace(settings, on_bytes=advance))
    for note in notes:
        show(f"left out: {note}")
    show(f"written: {folder}")
    return Outcome({**facts, "left_out": notes})


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(callback=_named)],
    folder: Target,
    config: ConfigFolder = None,
    dry_run: DryRunFlag = False,
) -> Outcome:
    """Convert another tool's checkpoint to fullshard's format. No code in it is executed.

    Args:
        source: A folder of Hugging Face, Accelerate, torch.distributed.checkpoint or DeepSpeed
            (ZeRO), a folder with the state dict of every rank, or a file of torch.save.
        folder: Folder to create for the checkpoint.
        config: see `ConfigFolder`.
        dry_run: see `DryRunFlag`.
    """
    from fullshard.formats.detect import open_source
    from fullshard.formats.hugging_face import with_model_names
    from fullshard.formats.ours import write_checkpoint
    from fullshard.formats.source import check_empty

    check_empty(folder, "import")
    with open_source(source, config) as files:
        found = with_model_names(files)
        kind = None if found.optimizer is None else found.optimizer.kind
        facts = {
            "source": found.what,
            "folder": folder,
            "step": found.step,
            "num_tensors": len(found.tensors),
            "optimizer": kind,
            "left_out": list(found.left_out),
        }
        optimizer = f", the states of {kind}" if kind else ""
        show(f"{found.what}: {len(found.tensors)} tensors, {_bytes(found.num_bytes)}{optimizer}")
        for note in found.left_out:
            show(f"left out: {note}")
        if not dry_run:
            with _claimed(folder), _progress("import", found.num_bytes) as advance:
                write_checkpoint(found, folder, advance)
            show(f"written: {folder}")
    return Outcome(facts)


@app.command()
def prune(
    folder: Folder, keep: Annotated[int, typer.Option(min=1)] = 1, dry_run: DryRunFlag = False
) -> Outcome:
    """Remove old checkpoints, and incomplete ones that crashes left behind.

    The newest complete checkpoints are kept, after they were read and found undamaged. A damaged
    checkpoint is not removed and does not count.

    Args:
        folder: see `Folder`.
        keep: Number of complete checkpoints to keep.
        dry_run: see `DryRunFlag`.
    """
    from fullshard.checkpoint.read import remove, superfluous
    from fullshard.checkpoint.retain import candidates, checkpoints_in, steps_folder

    candidates(folder)  # raises an error that explains why a folder has none
    found = superfluous(folder, keep)
    if not dry_run:
        remove(found)
    for entry in found:
        show(f"{'would remove' if dry_run else 'removed'} {entry.path}")
    kept = [entry for entry in checkpoints_in(folder) if entry not in found]
    for entry in (entry for entry in kept if entry.is_foreign):
        show(f"NOT OURS  {entry.path}: {entry.why}")
    show(f"{len(kept)} kept in {steps_folder(folder)}")
    return Outcome({"removed": [e.path for e in found], "kept": [e.path for e in kept]})


def _about(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Lines below the table of `inspect`."""
    position = facts["position"]
    beside = [name for name in facts["saved_beside"] if name != "position"]
    rows = [
        ("step", "none" if facts["step"] is None else f"{facts['step']:,}"),
        ("ranks", f"{facts['world_size']} wrote it; any number of ranks can read it"),
        ("elements", f"{facts['num_parameters_and_buffers']:,} in parameters and buffers"),
        ("files", f"{len(facts['files'])}, {_bytes(facts['num_bytes'])}"),
        ("tied", ", ".join(f"{k} = {v}" for k, v in facts["tied"].items()) or "nothing"),
        ("optimizer", facts["optimizer"] or "none"),
    ]
    rows += [
        (
            "",
            f"{row['name']}: {row['num_tensors']} of {row['dtype']}, {_bytes(row['num_bytes'])}"
            f"{', one per rank: the number of ranks must stay the same' if row['opaque'] else ''}",
        )
        for row in facts["optimizer_states"]
    ]
    if position is not None:
        rows.append(("position", ", ".join(f"{k} {v}" for k, v in position.items())))
    return [*rows, ("beside", ", ".join(beside) or "nothing")]


def _facts(found: Found) -> dict[str, Any]:
    return {
        "path": found.path,
        "step": found.step,
        "complete": found.manifest is not None,
        "foreign": found.is_foreign,
        "why": found.why or None,
        "num_bytes": found.num_bytes,
    }


def _bytes(count: int) -> str:
    from fullshard.planner.text import human_bytes

    return human_bytes(count)


@contextlib.contextmanager
def _progress(what: str, total: int) -> Generator[Callable[[int], None]]:
    """Show a progress bar if standard error is a terminal; yields a function that advances it."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)
