"""A run's folder: the paths of its files, and run.json.

runs/train/
  config.yaml        resolved, with origins          plan.json      what the engine ran
  run.json           status, planned, measured       metrics.jsonl  one object per step
  saves.jsonl        how long each save took         metrics.csv    the same as a table
  samples.jsonl      texts while it trains           logs/hang.txt  of a hang, who waits where
  machine-N.jsonl    use of each machine over time
  data/              tokens that the ranks map       report.html    drawn from the others
  model/             a Hugging Face folder           sample.txt     text from the model
  model_ema/         its average over the run (ema_decay)
  adapter/           the adapters only (lora); adapter_ema/
  student/           the student cut out of the teacher (distill.layers, distill.experts)
  logs/rank_k.log    checkpoints/step-00000100/
  checkpoints.txt    where the checkpoints are, if elsewhere (training.checkpoint_dir)
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from fullshard.checkpoint.files import write_text
from fullshard.checkpoint.retain import ELSEWHERE, checkpoints_of
from fullshard.checkpoint.storage import StorePath, storage_path
from fullshard.config.regular_files import did_you_mean_path
from fullshard.errors import ConfigError, FullshardError
from fullshard.launch.exit_codes import (
    ExitCode,
    as_ours,
    exit_code_of,
    left_by,
    of_place,
    public_name,
)
from fullshard.launch.run_lock import LOCK, RunLock, held_elsewhere, is_held
from fullshard.planner.text import SCHEMA_VERSION, check_version

logger = logging.getLogger(__name__)

LAST_SAVED = "last_saved_step"  # in run.json: the step of the last complete checkpoint
HOLDS = "holds"  # entry of run.json: the token of its lock of a store
KEPT = ("measured", LAST_SAVED)  # entries of run.json that stay when a run resumes
Fields = Callable[[Path | None], dict[str, Any]]


class RunStatus(StrEnum):
    """Status of a run. A killed run leaves PREPARING or RUNNING behind."""

    PREPARING = "preparing"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


_GOING_ON = (RunStatus.PREPARING, RunStatus.RUNNING)


class RunFolder:
    """The folder of one run, and the paths of its files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._id: str | None = None  # of the run whose record was read first
        self.config = path / "config.yaml"
        self.record = path / "run.json"
        self.plan = path / "plan.json"
        self.metrics = path / "metrics.jsonl"
        self.report = path / "report.html"
        self.data = path / "data"
        self.model, self.model_ema = path / "model", path / "model_ema"
        self.adapter, self.adapter_ema = path / "adapter", path / "adapter_ema"
        self.sample = path / "sample.txt"
        self.logs = path / "logs"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints, in the run's folder unless the run named another."""
        return checkpoints_of(self.path)

    def read_record(self) -> dict[str, Any]:
        """Reads run.json; raises ConfigError if the folder has none, or another run's by now."""
        try:
            found: Any = json.loads(self.record.read_text(encoding="utf-8"))
            if not isinstance(found, dict):
                raise ValueError("run.json does not contain a mapping")
            self._id = self._id or found.get("id")
            if self._id != found.get("id"):
                raise ValueError("the run's folder was moved, and another run uses its path")
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"run folder: expected a run's folder with run.json, got '{self.path}' ({error}). "
                + (did_you_mean_path(self.path) or "Pass the output_dir of a run.")
            ) from error
        check_version(found.get("schema_version", 1), f"'{self.record}'")
        return found

    @property
    def start_id(self) -> str | None:
        """Identifies the start that wrote run.json; None if none did, or not a readable one."""
        with contextlib.suppress(ConfigError):
            return RunFolder(self.path).read_record().get("id")
        return None

    def update_record(self, **fields: Any) -> None:
        """Replace fields of run.json in one rename, so that readers never see a part of it."""
        with self._alone():
            self._update(fields)

    def _update(self, fields: dict[str, Any]) -> None:
        _write_json(self.record, {**self.read_record(), **fields})

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Other ranks wait with their changes, where the file system has locks.

        `RunLock` has the lock of the folder itself.
        """
        with contextlib.ExitStack() as held:
            with contextlib.suppress(OSError):
                descriptor = os.open(self.logs, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                held.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield

    def fail(
        self,
        kind: str,
        message: str,
        exit_code: int,
        rank: int | None = None,
        *,
        final: bool = False,
    ) -> None:
        """Records why a run ended; a later reason replaces the first only if it is `final`.

        It raises nothing: the run's own error matters more than an error of its record.
        """
        if not self.record.is_file():
            return
        interrupted = exit_code in (ExitCode.INTERRUPTED, ExitCode.PREEMPTED)
        fields = {
            "status": RunStatus.INTERRUPTED if interrupted else RunStatus.FAILED,
            "exit_code": exit_code,
            "error": {"type": kind, "message": message, "rank": rank},
            "ended": now(),
        }
        try:
            with self._alone():
                status = self.read_record().get("status")
                if status == RunStatus.INTERRUPTED and exit_code == ExitCode.HANG:
                    return  # its peers found the rank gone that was interrupted
                if final or status in _GOING_ON:
                    self._update(fields)
        except (OSError, ConfigError) as error:
            logger.warning("run.json could not be written: %s", error)

    def is_going_on(self) -> bool:
        """Whether the run has not ended, according to run.json."""
        return self.record.is_file() and self.read_record().get("status") in _GOING_ON

    def end_killed(self) -> bool:
        """Record that a run was killed, if run.json still says running; needs its lock."""
        if not self.is_going_on():
            return False
        message = (
            "the run ended without recording the reason: its launcher was killed, the machine "
            "stopped, or code ended its ranks by os._exit. The same command resumes it."
        )
        logger.warning("%s: %s", self.path, message)
        self.fail("HangError", message, ExitCode.HANG)
        return True

    @contextlib.contextmanager
    def recorded(self, rank: int | None = None) -> Iterator[None]:
        """Records any error of the block, and raises it."""
        try:
            yield
        except BaseException as error:
            ended = isinstance(error, SystemExit)
            ours = left_by(error) if ended else of_place(error, may_pass=rank is not None)
            message = str(ours) or "stopped by a signal"
            self.fail(public_name(ours), message, exit_code_of(ours), rank)
            if isinstance(ours, ConfigError) and ours is not error:
                raise ours from error
            raise


@contextlib.contextmanager
def begin(
    output_dir: Path,
    command: str,
    *,
    continues: bool = False,
    fields: Fields = lambda _moved: {},
    checked: Callable[[], None] = lambda: None,
) -> Iterator[tuple[RunFolder, Path | None]]:
    """Makes the folder of a new run; an older run there is moved to the first free `.1`, `.2`.

    Inside the block this process owns the folder's lock, and errors are recorded in run.json. The
    record is written in one rename: a kill at any moment leaves the old run or a new one that can
    resume.

    Args:
        output_dir: Folder of the run.
        command: Command of fullshard, for the record.
        continues: The run in the folder continues and is not moved.
        fields: Returns further fields of the record; gets the place that the older run was moved
            to, or None.
        checked: Raises if the folder changed since the run was checked. Called once the
            folder is locked.

    Yields:
        The folder, and the place that the older run was moved to (None if there was none).

    Raises:
        ConfigError: The folder has other files than a run's, or its run is still running.
    """
    check_output_dir(output_dir)
    folder, moved = RunFolder(output_dir), None
    with contextlib.ExitStack() as stack:
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(RunLock(output_dir))
        except OSError as error:
            raise _cannot_be_made(output_dir, error) from error
        checked()
        for file in (folder.record, folder.config, folder.plan, folder.path / ELSEWHERE):
            for left in output_dir.glob(f".{file.name}.[0-9]*"):  # a kill interrupted `write_text`
                left.unlink()
        with contextlib.suppress(ConfigError):  # an unreadable record is moved aside
            folder.end_killed()
        if not continues and folder.record.is_file():
            moved = _move_older_run(output_dir)
            stack.enter_context(RunLock(output_dir))
            lock.close()
        before = folder.read_record() if continues else {}
        kept = {key: before[key] for key in KEPT if key in before}
        _write_json(
            folder.record,
            {
                "schema_version": SCHEMA_VERSION,
                "id": os.urandom(8).hex(),
                "command": command,
                "status": RunStatus.PREPARING,
                "exit_code": None,
                "error": None,
                "began": now(),
                "ended": None,
                "process": {"host": socket.gethostname(), "pid": os.getpid()},
                "measured": {},
                **kept,
                **fields(moved),
            },
        )
        folder = RunFolder(output_dir)
        folder.read_record()  # from now on, no other run's record is replaced
        with folder.recorded():
            folder.logs.mkdir(exist_ok=True)
            yield folder, moved


def check_output_dir(output_dir: Path) -> None:
    """Raises ConfigError if `begin` cannot make a run there; changes nothing."""
    key, others = "training.output_dir", set[str]()
    if isinstance(storage_path(output_dir), StorePath):
        raise ConfigError(
            f"{key}: expected a local folder, because logs and metrics are appended to files; got "
            f"'{storage_path(output_dir)}'. Set it as training.checkpoint_dir."
        )
    try:
        places = output_dir.absolute(), *output_dir.absolute().parents
        with contextlib.suppress(FileNotFoundError):
            others = {entry.name for entry in output_dir.iterdir() if not _is_of_start(entry)}
        with tempfile.TemporaryFile(dir=next(filter(os.path.lexists, places))):
            pass  # permissions do not show read-only mounts or /proc
    except NotADirectoryError:
        raise ConfigError(f"{key}: expected a folder, got the file '{output_dir}'.") from None
    except (OSError, ValueError) as error:
        raise _cannot_be_made(output_dir, error) from error
    if is_held(output_dir):
        raise held_elsewhere(output_dir)
    if others and "run.json" not in others:
        raise ConfigError(
            f"{key}: expected an empty folder or an older run, got '{output_dir}' with other "
            "files and no run.json. Use another folder."
        )


def _is_of_start(entry: Path) -> bool:
    """Whether a start that was refused or killed before it wrote run.json may have left it."""
    if entry.name == "logs" and entry.is_dir():
        return {file.name for file in entry.iterdir()} <= {"hang.txt"}
    return entry.name.startswith((LOCK, ".run.json."))


def _cannot_be_made(output_dir: Path, why: Exception) -> FullshardError:
    if isinstance(ours := as_ours(why), FullshardError):  # a full disk, no descriptor
        return ours
    place, reason = getattr(why, "filename", None), getattr(why, "strerror", None) or why
    inside = f": '{place}'" if str(place).startswith(f"{output_dir}/") else ""
    return ConfigError(
        f"training.output_dir: expected a folder that can be created and written to, got "
        f"{str(output_dir)[:80]!r} ({reason}{inside})."
    )


def now() -> str:
    """The time in UTC, for records."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _move_older_run(output_dir: Path) -> Path:
    """Renames the folder itself, not a link to it, so that a new run stays on the same disk."""
    place, number = output_dir.resolve(), 1
    try:
        if Path.cwd().is_relative_to(place):
            raise OSError(errno.EBUSY, "it is the working directory")
        while (target := place.with_name(f"{place.name}.{number}")).exists():
            number += 1
        place.rename(target)
        place.mkdir()
    except OSError as error:
        raise ConfigError(
            f"training.output_dir: expected a folder whose older run can be moved aside, got "
            f"'{output_dir}' ({error.strerror}). Use another folder, or move the run yourself."
        ) from error
    return target


def _write_json(path: Path, value: dict[str, Any]) -> None:
    """Replaces a file; on a full disk its blocks are overwritten, which is possible there."""
    try:
        write_text(path, json.dumps(value, indent=2) + "\n")
    except OSError:
        data = json.dumps(value).encode() + b"\n"
        if not path.is_file() or len(data) > path.stat().st_blocks * 512:
            raise
        with path.open("r+b") as file:
            file.write(data)
            file.truncate()
