"""From a configuration to running ranks.

    resolve world size -> check everything -> make the folder -> start local ranks, or be one

Nothing is written before all checks have passed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from fullshard.config.environment import LaunchEnvironment
from fullshard.config.files import JOBS
from fullshard.config.load import Resolved
from fullshard.config.values import Command
from fullshard.errors import ConfigError, DataError
from fullshard.launch.exit_codes import ExitCode
from fullshard.launch.spawn import LocalLaunch, launch_local_ranks
from fullshard.launch.supervise import LaunchResult
from fullshard.launch.topology import configured_topology
from fullshard.observe.report import write_report
from fullshard.planner.arrays import ArraysPlan
from fullshard.planner.plan import Plan
from fullshard.train.build import model_on_meta, plan_run
from fullshard.train.outlook import leaves_something, with_choices
from fullshard.train.prepare import Prepared, prepare
from fullshard.train.resume import Resume, check_same, find_resume, goes_on, own_resume
from fullshard.train.run_folder import RunFolder, RunStatus, begin, check_output_dir

logger = logging.getLogger(__name__)

RANK_MODULE = "fullshard.train.rank_main"
# What a restart would only meet again, or what somebody asked for.
FINAL = (
    ExitCode.CONFIG,
    ExitCode.WILL_NOT_FIT,
    ExitCode.DATA,
    ExitCode.DIVERGED,
    ExitCode.PREEMPTED,
    ExitCode.INTERRUPTED,
)


@dataclass(frozen=True)
class CheckedRun:
    """A run that nothing is known to be wrong with.

    Attributes:
        resolved: The configuration.
        prepared: Data, model configuration, counts of steps.
        plan: What the engine will run.
        output_dir: Where it will be written.
        resume: What it goes on from.
    """

    resolved: Resolved
    prepared: Prepared
    plan: Plan | ArraysPlan
    output_dir: Path
    resume: Resume


def output_dir_of(resolved: Resolved, command: Command) -> Path:
    """The run's folder."""
    return Path(resolved.config.training.output_dir or f"runs/{command}")


def world_size_of(resolved: Resolved, launch: LaunchEnvironment | None) -> int:
    """How many ranks a run has.

    Raises:
        ConfigError: The configuration and the launcher around us disagree.
    """
    asked = resolved.config.launch.num_processes
    if launch is None:
        return configured_topology(resolved.config.launch).world_size
    if asked is not None and asked != launch.world_size and _is_chosen(resolved):
        raise ConfigError(
            f"launch.num_processes: expected {launch.world_size}, the number of processes that "
            f"{launch.launcher} started, got {asked}. Leave it out."
        )
    return launch.world_size


def check(
    resolved: Resolved, world_size: int, command: Command, asked: str | None = None
) -> CheckedRun:
    """Everything that can be found wrong before a rank starts.

    Args:
        resolved: The configuration.
        world_size: All ranks.
        command: Which recipe it is for.
        asked: `--resume`: auto, never or a path; None: `training.resume_from_checkpoint`, or auto.

    Raises:
        ConfigError: With the line of the file where there is one.
        DataError: The same for the data.
        CheckpointError: What shall be gone on from is not there.
    """
    output_dir = output_dir_of(resolved, command)
    training = resolved.config.training
    try:
        check_output_dir(output_dir)
        resume = find_resume(asked or training.resume_from_checkpoint or "auto", output_dir)
        config = resolved.config
        if config.training.leaves_micro_batch:
            training = config.training.undivided(world_size)
            config = config.model_copy(update={"training": training})
        prepared = prepare(config, command, world_size, resume.global_batch)
        if resume.in_place and not goes_on(resume, output_dir, prepared.steps.num_steps):
            resume = Resume()
            prepared = prepared.with_batch(world_size, None)
        if leaves_something(resolved.config):
            model = model_on_meta(resolved.config, prepared.model_config)
            chosen = with_choices(resolved.config, model, world_size)
            prepared = replace(prepared, config=chosen).with_batch(world_size, resume.global_batch)
            resolved = replace(resolved, config=chosen)
        if resume.in_place and resume.path is not None:
            check_same(resolved, output_dir)
        return CheckedRun(resolved, prepared, plan_run(prepared, world_size), output_dir, resume)
    except ConfigError as error:
        raise resolved.located(error) from error
    except DataError as error:
        raise DataError(str(resolved.located(ConfigError(str(error))))) from error


def make_folder(checked: CheckedRun, command: Command) -> tuple[RunFolder, Path | None]:
    """Makes the run's folder with all that ranks read; returns it and where an older run went."""
    folder, moved = begin(checked.output_dir, command, goes_on=checked.resume.in_place)
    resume = checked.resume.moved(checked.output_dir, moved)
    folder.update_record(resume=resume.as_json())
    folder.config.write_text(checked.resolved.to_yaml(), encoding="utf-8")
    checked.prepared.dataset.save(folder.data)
    return folder, moved


def start_ranks(
    folder: RunFolder, world_size: int, stuck_s: float, max_restarts: int = 0
) -> tuple[LocalLaunch, LaunchResult]:
    """Runs the ranks of a prepared run on this machine until they end.

    After a failure that another try may not meet they are started again, up to `max_restarts`
    times, and go on from the newest checkpoint.
    """
    arguments = (str(folder.path),)
    first = LocalLaunch(RANK_MODULE, arguments, world_size, folder.logs, stuck_s=stuck_s)
    launch, result = first, launch_local_ranks(first)
    while result.exit_code != ExitCode.OK:
        _record_failure(folder, result)
        if result.exit_code in FINAL or launch.attempt == max_restarts:
            break
        cause = result.failure.message.splitlines()[0] if result.failure else "stopped"
        launch = replace(launch, attempt=launch.attempt + 1)
        logger.warning("restart %d of %d after: %s", launch.attempt, max_restarts, cause)
        _restart(folder)
        result = launch_local_ranks(launch)
    return launch, result


def _restart(folder: RunFolder) -> None:
    """Let the ranks find what to go on from."""
    resume = own_resume(folder)
    folder.update_record(
        status=RunStatus.PREPARING, exit_code=None, error=None, ended=None, resume=resume.as_json()
    )


def _record_failure(folder: RunFolder, result: LaunchResult) -> None:
    """What the launcher knows goes before what a rank wrote: it has seen all of them end."""
    cause = result.failure
    if cause is None:
        folder.fail("Interrupted", "stopped by a signal", result.exit_code, final=True)
    else:
        folder.fail(cause.type, cause.message, result.exit_code, cause.rank, final=True)
    write_report(folder.path)


def _is_chosen(resolved: Resolved) -> bool:
    """Whether a person wrote the number of processes; a job of ours has a suggestion."""
    origin = resolved.origins.get("launch.num_processes")
    return origin is not None and origin.file not in JOBS
