"""The commands of the recipes (`fullshard train` and others)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fullshard.cli.arguments import (
    OPEN_WORDS,
    ConfigFileFlag,
    ConfigFlag,
    DryRunFlag,
    Words,
    load,
    split_config,
)
from fullshard.cli.outcome import Outcome, launch_outcome, rank_failed
from fullshard.config.environment import LaunchEnvironment, read_launch_environment
from fullshard.config.values import Backend
from fullshard.errors import ConfigError, WillNotFitError
from fullshard.recipes.registry import Command, check_command, check_paths, check_resume

if TYPE_CHECKING:
    from fullshard.config.load import Resolved
    from fullshard.run.folder import RunFolder
    from fullshard.run.start import CheckedRun

ROOM_BYTES = 1 << 30  # more than a launcher that tokenizes and a server of ranks take (0.8 GiB)
# Keys that change what a model learns.
_LEARNING = ("distill.", "sft.", "training.learning_rate", "training.lr_", "training.max_s")
_LEARNING += ("training.num_train", "training.per_device_train", "training.w")

ResumeFlag = Annotated[
    str | None,
    typer.Option(help="auto, never, or a checkpoint to resume from. Default: auto."),
]
RestartsFlag = Annotated[
    int,
    typer.Option(
        "--max-restarts", "--max_restarts", min=0, help="Restart up to N times after a failure."
    ),
]


@dataclass(frozen=True)
class StartFlags:
    """Flags that say how to start a run; they are not keys of its configuration."""

    resume: str | None = None
    max_restarts: int = 0
    dry_run: bool = False
    is_local: bool = False  # start local ranks, even under a launcher


def app_of(recipe: Command) -> typer.Typer:
    """The command of a recipe; `distill-cache` is `distill` with the first word `cache`."""
    app = typer.Typer()

    @app.command(context_settings=OPEN_WORDS, help=recipe.help[0])
    def run(
        words: Words = None,
        config: ConfigFlag = None,
        config_file: ConfigFileFlag = None,
        resume: ResumeFlag = None,
        max_restarts: RestartsFlag = 0,
        dry_run: DryRunFlag = False,
    ) -> Outcome:
        flags, command = StartFlags(resume, max_restarts, dry_run), recipe
        if words and f"{recipe}-{words[0]}" in list(Command):
            command, words = Command(f"{recipe}-{words[0]}"), words[1:]
        job = recipe.about.job(None)
        resolved = load(words, config, config_file, default=job)
        if config_file is None and split_config(words or (), config)[0] is None:
            other = recipe.about.job(resolved)  # may depend on the words
            resolved = resolved if other == job else load(words, default=other)
        say_values(resolved)
        ended = _train_missing_model(command, resolved, flags)
        return run_recipe(command, resolved, flags) if ended is None else ended

    return app


def say_values(resolved: Resolved) -> None:
    """Print what a built-in job sets for the user's own model or data."""
    from fullshard.config.files import flatten

    launch = read_launch_environment()
    is_own = any(map(resolved.is_chosen, ("model.name_or_path", "data.path")))
    if not resolved.job or not is_own or (launch and launch.rank):
        return
    values = flatten(resolved.config.to_dict())
    origins = resolved.origins.items()
    ours = [key for key, at in origins if (at.file, at.written) == (resolved.job, key)]
    told = [f"{key.partition('.')[2]} {values[key]}" for key in ours if key.startswith(_LEARNING)]
    print(f"{resolved.job}: the built-in job's values hold without a CONFIG: {', '.join(told)}")


def _train_missing_model(command: Command, resolved: Resolved, flags: StartFlags) -> Outcome | None:
    """Train the model that a built-in job starts from, if it does not exist.

    Under a launcher, rank 0 trains it on local ranks while the others wait at the rendezvous.

    Returns:
        None if the model exists now, otherwise the outcome of the command.
    """

    if command.about.begins_with is None:
        return None
    folder, job = command.about.begins_with(resolved.config)
    first = load([], default=job)
    made = Path(first.config.training.output_dir or "", "model")
    launch = read_launch_environment()
    if folder is None or Path(folder) != made or made.is_dir() or (launch and launch.rank):
        return None
    _check_before_torch(command, resolved, flags, coming=made)
    print(f"{made} does not exist yet; it is trained first.", flush=True)
    alone = StartFlags(max_restarts=flags.max_restarts, dry_run=flags.dry_run, is_local=True)
    done = run_recipe(Command.TRAIN, first, alone)
    return done if done.exit_code != 0 or flags.dry_run else None


def _check_before_torch(
    command: Command, resolved: Resolved, flags: StartFlags, coming: Path | None = None
) -> LaunchEnvironment | None:
    """Check everything that needs no torch; return the launcher that started this process."""
    from fullshard.launch.machine import check_limit

    check_limit()
    launch = None if flags.is_local else read_launch_environment()
    try:
        check_command(resolved.config, command)
    except ConfigError as error:
        raise resolved.located(error) from None
    resolved.check_supported(launch=launch)
    if launch is None or launch.rank == 0:
        check_paths(resolved, coming, reads_data=True)
        if not (launch and launch.attempt):  # a restart resumes the run itself
            check_resume(resolved, flags.resume)
    return launch


def run_recipe(command: Command, resolved: Resolved, flags: StartFlags) -> Outcome:
    """Run a recipe on local ranks, or as one rank if a launcher started this process."""
    launch = _check_before_torch(command, resolved, flags)
    from fullshard.run import start  # imports torch

    world_size = start.world_size_of(resolved, launch)
    resolved = resolved.for_ranks(world_size)
    if launch is not None and not flags.dry_run:
        return _be_a_rank(command, resolved, launch, flags.resume)
    if flags.dry_run:
        return _show_plan(start.prepare_run(resolved, world_size, command, flags.resume))
    return _lead_ranks(command, resolved, world_size, flags)


def _lead_ranks(
    command: Command, resolved: Resolved, world_size: int, flags: StartFlags
) -> Outcome:
    """Prepare a run and start its ranks on this machine."""
    from fullshard.config.host_memory import available_bytes
    from fullshard.launch.exit_codes import caught_stop_signals
    from fullshard.launch.machine import num_visible_accelerators
    from fullshard.launch.spawn import fork_server
    from fullshard.run import start

    forks = resolved.config.backend is Backend.TORCH and not num_visible_accelerators()
    with ExitStack() as ending, ExitStack() as held:
        starting = nullcontext(None) if not forks else fork_server(start.RANK_IMPORTS)
        # Where memory is short, the run must be refused before the server takes any.
        server = held.enter_context(starting) if available_bytes() > ROOM_BYTES else None
        checked = _checked(command, resolved, world_size, flags.resume)
        folder = held.enter_context(start.made_folder(checked, command))
        server = server or held.enter_context(starting)
        caught = ending.enter_context(caught_stop_signals())  # a second Ctrl-C hides nothing
        limits = resolved.config.launch.timeout, flags.max_restarts
        local, result = start.start_ranks(folder, world_size, *limits, server, caught)
        held.close()
        after_stop = "" if result.failure or not result.exit_code else _how_to_resume(folder)
        record = {} if result.exit_code else folder.read_record()
        return launch_outcome(local, result, after_stop=after_stop, run_dir=folder.path, **record)


def _how_to_resume(folder: RunFolder) -> str:
    """The last saved step of a stopped run, and how to resume it."""
    from fullshard.checkpoint.retain import checkpoints_in

    saved = [found for found in checkpoints_in(folder.checkpoints) if found.manifest is not None]
    if not saved:
        return "No step was saved. The same command starts the run again."
    return (
        f"The last saved step is {saved[0].step}, in {saved[0].path}. "
        "The same command resumes from it, except with --resume never."
    )


def _be_a_rank(
    command: Command, resolved: Resolved, launch: LaunchEnvironment, resume: str | None
) -> Outcome:
    """Run as a rank of torchrun or srun: rank 0 prepares the run while the other ranks wait."""
    from fullshard.launch.rank_entry import run_rank
    from fullshard.launch.rendezvous import first_prepares, init_process_group
    from fullshard.launch.run_lock import wait_until_free
    from fullshard.run import start
    from fullshard.run.folder import RunFolder
    from fullshard.run.session import run

    folder = RunFolder(start.output_dir_of(resolved, command))

    @contextmanager
    def prepared() -> Iterator[None]:
        asked = resume
        if launch.attempt:  # restarted by the launcher: resume
            asked = "auto"
            wait_until_free(folder.path)
        checked = _checked(command, resolved, launch.world_size, asked)
        start.claim_elsewhere(checked)
        with start.made_folder(checked, command):
            yield

    def main() -> None:
        init_process_group(resolved.config.launch.timeout, folder.logs)
        with ExitStack() as held:
            first_prepares(lambda: held.enter_context(prepared()))
            try:
                run(resolved.config, folder.path)
            except BaseException:  # also a signal's
                if launch.rank == 0:
                    start.write_report_of_failure(folder)
                raise

    run_rank(main, rank_failed)
    if launch.rank != 0:
        return Outcome()
    return Outcome({"run_dir": folder.path, **folder.read_record()})


def _checked(
    command: Command, resolved: Resolved, world_size: int, resume: str | None
) -> CheckedRun:
    """Check a run. If it does not fit, its plan is written to its folder."""
    from fullshard.run import start

    try:
        return start.prepare_run(resolved, world_size, command, resume)
    except WillNotFitError as error:
        start.record_refusal(error, start.output_dir_of(resolved, command), command)
        raise


def _show_plan(checked: CheckedRun) -> Outcome:
    """Print the plan of a dry run."""
    from fullshard.run.console import planned

    facts = checked.dataset.facts
    print(f"would train into {checked.output_dir}: {checked.resume.sentence(checked.output_dir)}")
    print(
        f"data: {facts.origin}: {facts.num_train_tokens:,} training tokens, "
        f"{facts.num_held_out_tokens:,} held-out tokens"
    )
    for note in facts.notes:
        print(f"data: {note}")
    if facts.baseline is not None:
        print(f"interpolated bigram: {facts.baseline.nats:.4f} nats per token")
    print(checked.view.plan.tree())
    forecast = planned(checked.view, checked.steps)
    return Outcome({"run_dir": checked.output_dir, "planned": forecast})
