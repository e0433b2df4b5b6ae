"""From a configuration to running ranks.

    resolve world size -> check everything -> make the folder -> start local ranks, or be one

The checks run in the command's own process (or on rank 0 under torchrun), so a mistake is reported
once, before any rank starts. The run's folder is created after all checks, unless the run does not
fit: then its plan is recorded there.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fullshard import saving
from fullshard.checkpoint.commit import ALONE
from fullshard.checkpoint.files import write_text
from fullshard.checkpoint.read import choose
from fullshard.checkpoint.retain import ELSEWHERE, IN_RUN
from fullshard.checkpoint.storage import StorePath, storage_path
from fullshard.config.environment import LaunchEnvironment
from fullshard.config.load import Resolved
from fullshard.config.schema import RunConfig
from fullshard.config.training import TrainingConfig
from fullshard.config.values import Backend, DType, IntervalStrategy
from fullshard.data.dataset import DatasetFacts, PreparedData
from fullshard.errors import CheckpointError, ConfigError, DataError, WillNotFitError
from fullshard.launch.exit_codes import ExitCode, RankFailure
from fullshard.launch.fork_server import ForkServer
from fullshard.launch.machine import (
    check_accelerators,
    configured_topology,
    describe_command,
    existing_folder,
    num_visible_accelerators,
)
from fullshard.launch.run_lock import StoreLock, held_elsewhere, is_held
from fullshard.launch.spawn import LocalLaunch, launch_local_ranks
from fullshard.launch.supervise import LaunchResult
from fullshard.loading import check_loads
from fullshard.models.build import (
    check_weights,
    end_tokens,
    given_model_config,
    given_tokenizer,
    model_config_of,
    model_on_meta,
    vocab_size,
    weights_folder,
    with_fitting_length,
)
from fullshard.models.small import check_documents
from fullshard.models.student import STUDENT
from fullshard.observe.report import write_report
from fullshard.outlook.search import choice_of
from fullshard.planner.spec import ITEMSIZE
from fullshard.planner.text import human_bytes
from fullshard.recipes.base import make_data
from fullshard.recipes.registry import Command
from fullshard.run.console import planned
from fullshard.run.folder import HOLDS, RunFolder, RunStatus, begin, check_output_dir
from fullshard.run.optim import KINDS, StepPlan, check_optimizer, plan_steps
from fullshard.run.outlook import View, foresee, leaves_choices, topology_of
from fullshard.run.resume import (
    TEACHER,
    Resume,
    check_checkpoint_dir,
    check_data,
    check_model,
    check_saved,
    check_settings,
    continues,
    find_resume,
    own_resume,
    position_of,
    sample_of_teacher,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from fullshard.run.xla_outlook import XlaOutlook

logger = logging.getLogger(__name__)

RANK_MODULE = "fullshard.run.rank"
SAMPLED = 64  # rows of conversations in which end tokens are looked for
# Modules that every rank on torch imports, whatever its model.
RANK_IMPORTS = ("fullshard.run.on_torch", "fullshard.engine.engine", "transformers.modeling_utils")
# Exit codes without a restart: the error would repeat, or the user stopped the run.
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
    """A run that passed every check that needs no ranks.

    Attributes:
        resolved: Configuration of the run and the origin of every value.
        dataset: Tokens or conversations, ready to be written into the run's folder.
        steps: Number of steps, and the steps with evaluations and checkpoints.
        view: Plan of the run with its memory and time.
        output_dir: Folder of the run.
        resume: Checkpoint that the run resumes from, if any.
        start_id: See `RunFolder.start_id`, of the run that was found in the folder.
        teacher: See `sample_of_teacher`; taken before the teacher was checked.
    """

    resolved: Resolved
    dataset: PreparedData
    steps: StepPlan
    view: View | XlaOutlook
    output_dir: Path
    resume: Resume
    start_id: str | None
    teacher: str | None

    def check_same_start(self) -> None:
        """Raises ConfigError if another start used the folder since this run was checked."""
        if RunFolder(self.output_dir).start_id != self.start_id:
            raise ConfigError(
                "training.output_dir: expected a folder that no other start uses, got "
                f"'{self.output_dir}', where another start began a run meanwhile. Start again to "
                "resume that run, or use another folder."
            )


def output_dir_of(resolved: Resolved, command: Command) -> Path:
    """The folder of the run."""
    return Path(resolved.config.training.output_dir or f"runs/{command}")


def world_size_of(resolved: Resolved, launch: LaunchEnvironment | None) -> int:
    """Number of ranks of a run.

    Raises:
        ConfigError: The configuration and the launcher disagree, or there are too few GPUs.
    """
    asked = resolved.config.launch.world_size
    if launch is None:
        topology = configured_topology(resolved.config.launch)
        if resolved.config.backend is Backend.TORCH:
            check_accelerators(num_visible_accelerators(), topology.local_world_size or 1)
        return topology.world_size
    if (
        asked is not None
        and asked != launch.world_size
        and any(map(resolved.is_chosen, ("launch.num_processes", "launch.nproc_per_node")))
    ):
        raise ConfigError(
            f"launch.num_processes: expected {launch.world_size}, the number of processes that "
            f"{launch.launcher} started, got {asked}. Leave it out."
        )
    return launch.world_size


def prepare_run(
    resolved: Resolved, world_size: int, command: Command, asked: str | None = None
) -> CheckedRun:
    """Checks everything that can be checked before a rank starts.

    Args:
        resolved: Configuration of the run, with origins.
        world_size: Number of ranks.
        command: Recipe of the run.
        asked: `--resume`: auto, never or a path; None: `training.resume_from_checkpoint`, or auto.

    Raises:
        ConfigError: The configuration is wrong; names the line of the file if there is one.
        DataError: The data cannot be used.
        CheckpointError: There is no checkpoint to resume from.
        WillNotFitError: The run needs more memory or disk than there is.
    """
    output_dir = output_dir_of(resolved, command)
    try:
        check_output_dir(output_dir)
        start_id = RunFolder(output_dir).start_id
        resolved = with_fitting_length(resolved)
        key = "training.resume_from_checkpoint" if asked is None else "--resume"
        if asked is None:
            asked = resolved.config.training.resume_from_checkpoint or "auto"
        checkpoint_dir = resolved.config.training.checkpoint_dir
        resume = find_resume(asked, output_dir, key, checkpoint_dir)
        check_weights(resolved.config)  # before the model is traced
        teacher = sample_of_teacher(resolved.config)
        view = foresee(resolved.config, topology_of(resolved.config, world_size))
        training = view.config.training
        if isinstance(view, View) and leaves_choices(resolved.config):
            resolved = replace(resolved, config=view.config)
            logger.info("auto selects %s", choice_of(view.outlook))
        _check_memory(view)
        dataset, model_config = _read_data(view.config, command)
        num_batches = resolved.config.sharding.num_batches(world_size)
        steps = plan_steps(training, dataset.facts, num_batches, resume.global_batch)
        if resume.in_place and not continues(resume, output_dir, steps.num_steps):
            resume, steps = Resume(), plan_steps(training, dataset.facts, num_batches)
        check_checkpoint_dir(checkpoint_dir, resume, output_dir)
        check_settings(resolved, output_dir, resume)
        if resume.path is not None:
            found = choose(ALONE, resume.path, whole=False)
            resume.check_steps(found.step or 0, found.path, steps.num_steps)
            check_data(resume, position_of(found), steps)
            if isinstance(view, View):
                model = model_on_meta(view.config, model_config)
                check_loads(found, model, KINDS[training.optim])
                model_config = getattr(model, "config", model_config)  # some classes change it
            check_model(resume, found, model_config, dataset.tokenizer)
        _say_kept_batch(training, num_batches, steps)
        _check_disk(command, view, steps, RunFolder(output_dir), resume)
        return CheckedRun(resolved, dataset, steps, view, output_dir, resume, start_id, teacher)
    except (CheckpointError, ConfigError, DataError) as error:
        # Another start may have moved the older run meanwhile.
        cause = held_elsewhere(output_dir) if is_held(output_dir) else error
        raise resolved.located(cause) from error


def _say_kept_batch(training: TrainingConfig, num_batches: int, steps: StepPlan) -> None:
    asked = training.per_device_train_batch_size * training.gradient_accumulation_steps
    kept = steps.order.shape.global_batch
    if asked * num_batches != kept:
        told = "%d samples per step stay, as the resumed run had; the configuration has %d"
        logger.info(told, kept, asked * num_batches)


def claim_elsewhere(checked: CheckedRun) -> None:
    """Locks a `checkpoint_dir` for this process, which will save as rank 0; not a store's.

    Raises:
        CheckpointError: Another process saves there.
    """
    place = checked.resolved.config.training.checkpoint_dir
    if place is not None and checked.steps.save_every is not None:
        saving.SAVES.claim_folder(storage_path(place))


@contextmanager
def made_folder(checked: CheckedRun, command: Command) -> Iterator[RunFolder]:
    """Makes the run's folder with everything that ranks read; locks it inside the block.

    Checkpoints that are elsewhere in a store are locked, too. A run that has ended since the check
    may have saved there. The log says what happens to an older run in the folder.
    """

    def fields(moved: Path | None) -> dict[str, Any]:
        resume = checked.resume.moved(checked.output_dir, moved)
        told: dict[str, Any] = {
            "resume": resume.as_json(),
            "planned": planned(checked.view, checked.steps),
        }
        if checked.teacher is not None:
            told[TEACHER] = checked.teacher
        return {**told, "started_by": describe_command(), HOLDS: token}

    how: Any = {"continues": checked.resume.in_place, "checked": checked.check_same_start}
    token = os.urandom(8).hex()
    elsewhere = checked.resolved.config.training.checkpoint_dir
    place = storage_path(elsewhere or "")
    with StoreLock(place, token) if isinstance(place, StorePath) else nullcontext():
        check_checkpoint_dir(elsewhere, checked.resume, checked.output_dir)
        with begin(checked.output_dir, command, fields=fields, **how) as (folder, moved):
            if moved is not None:
                logger.info("moved the older run in %s to %s", folder.path, moved)
            if checked.resume.in_place:
                where = "" if checked.resume.path else " from step 0, because it has no checkpoint"
                told = "resuming the run in %s%s (`--resume never` starts a new run)"
                logger.info(told, folder.path, where)
            write_text(folder.config, checked.resolved.to_yaml())
            write_text(folder.plan, checked.view.plan.to_json())
            aside = folder.path / ".data.new"
            with suppress(FileNotFoundError):
                shutil.rmtree(aside)  # left by a killed start
            checked.dataset.save(aside)
            with suppress(FileNotFoundError):
                shutil.rmtree(folder.data)
            aside.rename(folder.data)
            if checked.resume.path is None:  # perhaps of another teacher, or cut in another way
                with suppress(FileNotFoundError):
                    shutil.rmtree(folder.path / STUDENT)
            (folder.path / ELSEWHERE).unlink(missing_ok=True)
            if elsewhere is not None:
                write_text(folder.path / ELSEWHERE, f"{place.resolve()}\n")
            yield folder


def _read_data(config: RunConfig, command: Command) -> tuple[PreparedData, PretrainedConfig]:
    """Reads, checks and tokenizes the data; also returns the model's configuration.

    Raises:
        ConfigError: The model, its tokenizer or the optimizer cannot be used.
        DataError: The data cannot be used.
    """
    check_optimizer(config.training.optim)
    tokenizer, kind = given_tokenizer(config), command.kind
    kind.check(config, tokenizer)
    _check_trains_tokenizer(config, tokenizer)
    entries = vocab_size(config, given_model_config(config))
    dataset = make_data(config, command, tokenizer, entries)
    model_config = model_config_of(config, dataset.tokenizer)
    kind.check_data(config, dataset.facts)
    _check_held_out(config.training, dataset.facts)
    _check_ends(dataset, end_tokens(model_config))
    if config.sft is not None and config.sft.packing and kind.uses_chats(config):
        check_documents(model_config)
    if dataset.facts.separator is not None:
        check_documents(model_config, "data.separate_documents")
    return dataset, model_config


def _check_held_out(training: TrainingConfig, facts: DatasetFacts) -> None:
    """Raise ConfigError, or warn, if evaluations are configured and nothing is held out."""
    if facts.num_held_out_sequences or training.evaluates is IntervalStrategy.NO:
        return
    if training.early_stopping_patience is not None:
        raise ConfigError(
            "training.early_stopping_patience: expected held-out data, got none. Raise "
            "data.validation_fraction, or remove it."
        )
    logger.warning("no evaluations, because no data is held out (data.validation_fraction)")


def _check_ends(dataset: PreparedData, ends: list[int]) -> None:
    """Warns if none of the tokens that end generated text is trained."""
    trained: Any = dataset.tokenizer.eos_token_id
    if dataset.kind == "chat":  # its template ends the answers
        rows = np.arange(min(SAMPLED, dataset.facts.num_train_sequences))
        trained = dataset.arrays(rows, held_out=False)["labels"]
    if ends and trained is not None and not np.isin(ends, trained).any():
        logger.warning(
            "generated text will not end by itself: of its end tokens (eos_token_id of the model: "
            "%s), none is trained",
            ", ".join(map(str, ends)),
        )


def _check_trains_tokenizer(config: RunConfig, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Raises ConfigError for weights without a tokenizer, unless the user asks for a new one."""
    teacher = (config.teacher and config.teacher.name_or_path) or None
    weights = weights_folder(config) or (Path(teacher) if teacher else None)
    if tokenizer is not None or weights is None or config.data.vocab_size is not None:
        return
    key = "model.name_or_path" if weights_folder(config) else "teacher.name_or_path"
    raise ConfigError(
        f"{key}: expected weights with their tokenizer, got '{weights}' without one. Put its files "
        "into the folder, or set data.tokenizer to their folder. data.vocab_size trains a new "
        "tokenizer on the data, whose tokens are new to these weights."
    )


def record_refusal(error: WillNotFitError, output_dir: Path, command: Command) -> None:
    """Records the plan of a refused run, unless its folder has an older run."""
    if error.planned is None or (output_dir.is_dir() and any(output_dir.iterdir())):
        return
    with begin(output_dir, command, fields=lambda _: {"planned": error.planned}) as (folder, _):
        folder.fail("WillNotFitError", str(error), error.exit_code)


def _check_memory(view: View | XlaOutlook) -> None:
    """Raises WillNotFitError, with the plan and advice, if a phase of the run does not fit."""
    lack = view.lack()
    if lack is None:
        return
    rows, advice = view.rows, list[str]()
    if isinstance(view, View):
        advice = [one.sentence(view.outlook) for one in view.study().advice]
    error = WillNotFitError(lack.refusal(rows, advice))
    error.planned = planned(view)
    raise error


def _check_disk(
    command: Command, view: View | XlaOutlook, steps: StepPlan, folder: RunFolder, resume: Resume
) -> None:
    """Raises WillNotFitError if the disk has no room for the run's checkpoints and its model.

    The checkpoints and the model of a run that is resumed count as free space, because the resumed
    run replaces them. A run that starts again moves the older one aside, which frees nothing.
    """
    if command.kind.write is not None:  # `distill cache` saves neither checkpoints nor a model
        return
    plan, training = view.plan, view.config.training
    element = ITEMSIZE[view.config.sharding.master_dtype or DType.FLOAT32]
    exported = plan.num_parameters * element * (2 if training.ema_decay is not None else 1)
    saves_here = steps.save_every if training.checkpoint_dir is None else None
    saves = -(-steps.num_steps // saves_here) if saves_here else 0
    kept = min(saves, (training.save_total_limit or saves) + 1)  # during a save, one more exists
    size = plan.checkpoint_bytes
    needed = exported + kept * size
    place = existing_folder(folder.path)
    disk = shutil.disk_usage(place)
    own = folder.path / IN_RUN, folder.model, folder.model_ema
    replaced = own if resume.in_place else ()
    old = sum(
        file.stat().st_size for part in replaced for file in part.rglob("*") if file.is_file()
    )
    if disk.total == 0 or needed <= disk.free + old:  # a file system that reports no size
        return
    error = WillNotFitError(
        f"training.output_dir: expected {human_bytes(needed)} of disk for {kept} checkpoint(s) of "
        f"{human_bytes(size)} and the model ({human_bytes(exported)}); got "
        f"{human_bytes(disk.free)} free in '{place}'. Lower save_total_limit, raise save_steps, "
        "set save_strategy: no, or use another output_dir."
    )
    error.planned = planned(view, steps)
    raise error


def start_ranks(
    folder: RunFolder,
    world_size: int,
    stuck_s: float,
    max_restarts: int = 0,
    server: ForkServer | None = None,
    caught: list[int] | None = None,
) -> tuple[LocalLaunch, LaunchResult]:
    """Runs the ranks of a prepared run on this machine until they end.

    After a failure that a retry may avoid, they are restarted up to `max_restarts` times and resume
    from the newest checkpoint.

    Args:
        folder: The run's folder.
        world_size: Number of ranks.
        stuck_s: Seconds after which a rank counts as stuck.
        max_restarts: See above.
        server: Forks the ranks.
        caught: Signals of the caller's `caught_stop_signals`; None: the launch catches its own.
    """
    module, arguments = RANK_MODULE, (str(folder.path),)
    launch = LocalLaunch(module, arguments, world_size, folder.logs, stuck_s=stuck_s, caught=caught)
    result = _launched(folder, replace(launch, server=server))
    while result.exit_code != ExitCode.OK:
        _record_failure(folder, result)
        if result.exit_code in FINAL or launch.attempt == max_restarts or caught:
            break
        cause = result.failure.message.splitlines()[0] if result.failure else "stopped"
        launch = replace(launch, attempt=launch.attempt + 1)
        logger.warning("restart %d of %d after: %s", launch.attempt, max_restarts, cause)
        cleared = dict.fromkeys(("exit_code", "error", "ended"))
        check_saved(resume := own_resume(folder), folder)
        folder.update_record(status=RunStatus.PREPARING, resume=resume.as_json(), **cleared)
        result = _launched(folder, launch)
    return launch, result


def _launched(folder: RunFolder, launch: LocalLaunch) -> LaunchResult:
    """Runs the ranks once; exit codes of 0 are a failure if no rank recorded the end of the run."""
    result = launch_local_ranks(launch)
    if result.exit_code or folder.read_record().get("status") == RunStatus.FINISHED:
        return result
    said = (
        "rank 0: expected to record the end of the run, but all ranks ended with exit code 0 "
        "before. Search the code of the model and of libraries for os._exit."
    )
    code = int(ExitCode.UNEXPECTED)
    return LaunchResult(code, RankFailure(0, "RankExit", said, code, "", 0.0))


def _record_failure(folder: RunFolder, result: LaunchResult) -> None:
    """Replaces the error that a rank recorded by the cause that the launcher found."""
    cause = result.failure
    if cause is None:
        folder.fail("Interrupted", "stopped by a signal", result.exit_code, final=True)
    else:
        folder.fail(cause.type, cause.message, result.exit_code, cause.rank, final=True)
    write_report_of_failure(folder)


def write_report_of_failure(folder: RunFolder) -> None:
    """Writes the page of a failed run; an error here must not hide the run's own error."""
    try:
        write_report(folder.path)
    except Exception as error:  # noqa: BLE001  the run's own error matters more
        logger.warning("report.html could not be written: %s", error)
