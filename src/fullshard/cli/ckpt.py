"""`fullshard ckpt`: lists, inspects, verifies, converts and prunes checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import replace
from os.path import realpath
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullshard.cli.arguments import DryRunFlag
from fullshard.cli.outcome import Outcome, print_table, show
from fullshard.errors import untrusted

if TYPE_CHECKING:
    from fullshard.checkpoint.retain import Found

app = typer.Typer(
    no_args_is_help=True, help="List, inspect, verify, convert and prune checkpoints."
)


def _named(path: Path) -> Path:
    """The path; a missing one is refused before torch is imported."""
    from fullshard.checkpoint.retain import candidates

    with untrusted(f"'{path}'", "a checkpoint"):
        if not path.exists():
            candidates(path)
    return path


def _outside(ctx: typer.Context, folder: Path) -> Path:
    """The folder to write; one in a checkpoint would be pruned with it, or pass for one."""
    from fullshard.checkpoint.retain import checkpoints_in, look_at
    from fullshard.checkpoint.storage import StorePath, storage_path
    from fullshard.errors import CheckpointError

    if isinstance(storage_path(folder), StorePath):
        raise CheckpointError(
            f"FOLDER: expected a local folder, got '{storage_path(folder)}'. Write a folder, and "
            "copy it there."
        )
    real = Path(realpath(folder))
    within = next((place for place in real.parents if look_at(place).manifest), None)
    if ctx.info_name == "export" and real.name.startswith("step-") and checkpoints_in(real.parent):
        within = real.parent
    if within is not None:
        raise CheckpointError(
            f"FOLDER: expected a folder outside of checkpoints, got '{folder}' in '{within}', from "
            "which it may be pruned. Write outside of it, for example to "
            f"'{within}-{ctx.info_name}'."
        )
    return folder


Folder = Annotated[Path, typer.Argument(help="A folder of step-* folders, or a run's folder.")]
NEWEST = "A checkpoint, or a folder or run, of which the newest is taken."
Target = Annotated[Path, typer.Argument(callback=_outside)]
Any_ = Annotated[Path, typer.Argument(callback=_named, help=NEWEST)]


ConfigFolder = Annotated[
    Path | None,
    typer.Option(help="Folder with config.json and tokenizer, if the checkpoint has none."),
]


@app.command()
def ls(folder: Folder) -> Outcome:
    """List a folder's checkpoints, the newest first, and what is wrong with unfinished ones."""
    from fullshard.checkpoint.retain import candidates

    found = candidates(folder)
    print_table(
        ("step", "bytes", "checkpoint", ""),
        [
            (
                "" if entry.step is None else str(entry.step),
                _bytes(entry.num_bytes) if entry.manifest else "",
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
    """Show every tensor, the optimizer's states, the step, the ranks and the data position."""
    from fullshard.checkpoint.read import Checkpoint, facts_of
    from fullshard.checkpoint.retain import newest_complete

    with Checkpoint.open(newest_complete(checkpoint, warns=True)) as opened:
        facts = facts_of(opened)
    show(facts["path"])
    print_table(
        ("tensor", "dtype", "shape", "slices", "bytes"),
        [
            (
                f"{row['name']}{' (each rank its own)' if row['opaque'] else ''}",
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
    """Read every byte and compare checksums; name the file and the tensor where they differ."""
    from fullshard.checkpoint.read import find_damage
    from fullshard.checkpoint.retain import candidates, newest_complete
    from fullshard.errors import CheckpointError

    found = newest_complete(checkpoint, warns=True)
    newest = next((entry for entry in candidates(checkpoint) if not entry.is_leftover), found)
    with _progress("verify", found.num_bytes) as advance:
        damages = find_damage(found, advance)
    for damage in damages:
        tensors = ", ".join(damage.tensors) or "no tensor: a text or padding"
        show(f"DAMAGED  {found.path / damage.file}: {damage.why} ({tensors})")
    result = {
        **_facts(found),
        "damaged": [{"file": d.file, "why": d.why, "tensors": d.tensors} for d in damages],
    }
    if damages:
        return Outcome(result, CheckpointError.exit_code)
    if newest.manifest is None:
        show(f"DAMAGED  {newest.path}: {newest.why}; {found.path.name} is whole")
        return Outcome(result, CheckpointError.exit_code)
    show(f"WHOLE  {found.path}: {_bytes(found.num_bytes)} are what was written")
    return Outcome(result)


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(callback=_named)],
    b: Annotated[Path, typer.Argument(callback=_named)],
) -> Outcome:
    """Compare two checkpoints tensor by tensor; the exit code is 8 if they differ.

    Args:
        a: A checkpoint, or a Hugging Face folder.
        b: Another one.
    """
    from fullshard.errors import VerifyError
    from fullshard.formats.detect import open_source
    from fullshard.formats.hugging_face import with_model_names
    from fullshard.formats.source import Match, Row, compare

    with open_source(a) as one, open_source(b) as other:
        if one.tensors.keys() != other.tensors.keys():  # a checkpoint, and the files of its model
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
            {
                "name": row.name,
                "verdict": row.verdict,
                "max_abs": str(row.max_abs) if row.max_abs == float("inf") else row.max_abs,
                "about": row.about,
            }
            for row in differ
        ],
    }
    return Outcome(result, VerifyError.exit_code if differ else 0)


@app.command()
def export(  # noqa: PLR0913  (one parameter an option)
    checkpoint: Any_,
    folder: Target,
    dtype: str | None = None,
    max_shard_size: Annotated[str, typer.Option("--max-shard-size", "--max_shard_size")] = "5GB",
    format_: Annotated[str, typer.Option("--format")] = "hf",
    config: ConfigFolder = None,
    dry_run: DryRunFlag = False,
) -> Outcome:
    """Write a checkpoint as a folder that `from_pretrained` opens, or for torch's dcp.load.

    Args:
        checkpoint: see `Any_`.
        folder: A new folder.
        dtype: Dtype of floating point tensors: bf16, fp16, fp32. Default: unchanged.
        max_shard_size: Largest size of one weights file.
        format_: hf: a Hugging Face folder; dcp: torch's own.
        config: see `ConfigFolder`.
        dry_run: see `DryRunFlag`.
    """
    from fullshard.formats.export import ExportSettings, export_folder, opened

    settings = ExportSettings.of(format_, dtype, max_shard_size)
    with opened(checkpoint, config) as source:
        show(f"{source.what}: {len(source.tensors)} tensors, {_bytes(source.num_bytes)}")
        facts = {"source": source.what, "folder": folder, "num_tensors": len(source.tensors)}
        if dry_run:
            return Outcome({**facts, "left_out": list(source.left_out)})
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
    """Make a checkpoint of what another tool saved; nothing in it is executed.

    Args:
        source: A Hugging Face folder, or one of Accelerate, torch.distributed.checkpoint, DeepSpeed
            (ZeRO), of sharded state dicts of ranks; a file of torch.save.
        folder: A new folder: the checkpoint.
        config: see `ConfigFolder`.
        dry_run: see `DryRunFlag`.
    """
    from fullshard.formats.export import opened
    from fullshard.formats.hugging_face import with_model_names
    from fullshard.formats.ours import write_checkpoint

    with opened(source, config) as files:
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
            with _progress("import", found.num_bytes) as advance:
                write_checkpoint(found, folder, advance)
            show(f"written: {folder}")
    return Outcome(facts)


@app.command()
def prune(
    folder: Folder, keep: Annotated[int, typer.Option(min=1)] = 1, dry_run: DryRunFlag = False
) -> Outcome:
    """Remove all complete checkpoints but the newest, and what crashes left behind.

    What is kept is read first: a damaged checkpoint stays, and does not count.

    Args:
        folder: see `Folder`.
        keep: Complete checkpoints to keep.
        dry_run: see `DryRunFlag`.
    """
    from fullshard.checkpoint.read import remove, superfluous
    from fullshard.checkpoint.retain import candidates, checkpoints_in, steps_folder

    candidates(folder)  # says what is wrong with a folder that has none
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
    """The lines of `inspect` below its table."""
    position = facts["position"]
    beside = [name for name in facts["saved_beside"] if name != "position"]
    rows = [
        ("step", "none" if facts["step"] is None else f"{facts['step']:,}"),
        ("ranks", f"{facts['world_size']} wrote it; any number can read it"),
        ("elements", f"{facts['num_parameters_and_buffers']:,} in parameters and buffers"),
        ("files", f"{len(facts['files'])}, {_bytes(facts['num_bytes'])}"),
        ("tied", ", ".join(f"{k} = {v}" for k, v in facts["tied"].items()) or "nothing"),
        ("optimizer", facts["optimizer"] or "none"),
    ]
    rows += [
        (
            "",
            f"{row['name']}: {row['num_tensors']} of {row['dtype']}, {_bytes(row['num_bytes'])}"
            f"{', each rank its own: only as many ranks can resume' if row['opaque'] else ''}",
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
    """A bar on standard error, where that is a terminal; call what is yielded with the advance."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)
