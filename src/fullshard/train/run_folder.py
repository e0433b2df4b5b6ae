"""A run's folder: where every file of a run lies, and the record of how it went.

runs/train/
  config.yaml        resolved, with origins          plan.json      what the engine ran
  run.json           status, planned, measured       metrics.jsonl  one object a step
  saves.jsonl        how long each save took         metrics.csv    the same as a table
  data/              tokens that the ranks map       report.html    drawn from the others
  model/             a Hugging Face folder           sample.txt     what the model writes
  model_ema/         its average over the run (ema_decay)
  adapter/           the adapters alone (lora); adapter_ema/
  logs/rank_k.log    checkpoints/step-00000100/
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil

from fullshard.errors import ConfigError
from fullshard.launch.exit_codes import ExitCode

SCHEMA_VERSION = 1


class RunStatus(StrEnum):
    """How far a run came. PREPARING and RUNNING are also what a killed run leaves behind."""

    PREPARING = "preparing"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def record(self) -> Path:
        return self.path / "run.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def model_ema(self) -> Path:
        return self.path / "model_ema"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def adapter_ema(self) -> Path:
        return self.path / "adapter_ema"

    @property
    def sample(self) -> Path:
        return self.path / "sample.txt"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def read_record(self) -> dict[str, Any]:
        """The run's record; raises ConfigError where the folder holds none."""
        try:
            return json.loads(self.record.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise ConfigError(
                f"run folder: expected a run's folder with run.json, got '{self.path}' ({error}). "
                "Name the output_dir of a run."
            ) from error

    def update_record(self, **fields: Any) -> None:
        """Replaces fields of the record, in one rename, so that readers never see half of it."""
        record = self.read_record() if self.record.is_file() else {}
        _write_json(self.record, {**record, **fields})

    def fail(
        self,
        kind: str,
        message: str,
        exit_code: int,
        rank: int | None = None,
        *,
        final: bool = False,
    ) -> None:
        """Records why a run ended; the first reason stays, unless a later one is `final`."""
        if not self.record.is_file():
            return
        record = self.read_record()
        if not final and record.get("status") not in (RunStatus.PREPARING, RunStatus.RUNNING):
            return
        interrupted = exit_code in (ExitCode.INTERRUPTED, ExitCode.PREEMPTED)
        self.update_record(
            status=RunStatus.INTERRUPTED if interrupted else RunStatus.FAILED,
            exit_code=exit_code,
            error={"type": kind, "message": message, "rank": rank},
            ended=now(),
        )


def begin(
    output_dir: Path, command: str, *, goes_on: bool = False
) -> tuple[RunFolder, Path | None]:
    """Makes the folder of a new run; an older run there is moved to the first free `.1`, `.2`.

    Args:
        output_dir: Where the run shall lie.
        command: Of fullshard, for the record.
        goes_on: The older run is the new one: it stays.

    Returns:
        The folder, and where the older run now lies (None where there was none).

    Raises:
        ConfigError: The place holds something else than a run, or a run that is still going on.
    """
    moved = None if goes_on else _move_older_run(output_dir)
    folder = RunFolder(output_dir)
    before = folder.read_record() if goes_on else {}  # what a rank has not replaced yet, holds
    output_dir.mkdir(parents=True, exist_ok=True)
    folder.logs.mkdir(exist_ok=goes_on)
    _write_json(
        folder.record,
        {
            "schema_version": SCHEMA_VERSION,
            "command": command,
            "status": RunStatus.PREPARING,
            "exit_code": None,
            "error": None,
            "began": now(),
            "ended": None,
            "process": _this_process(),
            "planned": before.get("planned", {}),
            "measured": before.get("measured", {}),
        },
    )
    return folder, moved


def check_output_dir(output_dir: Path) -> None:
    """Raises ConfigError where `begin` could not make a run there; changes nothing."""
    if not output_dir.exists():
        return
    if not output_dir.is_dir():
        raise ConfigError(
            f"training.output_dir: expected a folder, got the file '{output_dir}'. Name another."
        )
    if not any(output_dir.iterdir()):
        return
    if not (output_dir / "run.json").is_file():
        raise ConfigError(
            f"training.output_dir: expected an empty folder or an older run, got '{output_dir}' "
            "with other files. Name another folder."
        )
    if _is_alive(RunFolder(output_dir).read_record()):
        raise ConfigError(
            f"training.output_dir: expected a folder that no run uses, got '{output_dir}', whose "
            "run is still going on. Name another folder or stop that run."
        )


def now() -> str:
    """The time in UTC, for records."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _move_older_run(output_dir: Path) -> Path | None:
    check_output_dir(output_dir)
    if not output_dir.exists():
        return None
    if not any(output_dir.iterdir()):
        return None
    number = 1
    while (target := output_dir.with_name(f"{output_dir.name}.{number}")).exists():
        number += 1
    output_dir.rename(target)
    return target


def _this_process() -> dict[str, Any]:
    """Enough to tell later whether this very process still runs."""
    process = psutil.Process()
    return {"host": socket.gethostname(), "pid": process.pid, "created": process.create_time()}


def _is_alive(record: dict[str, Any]) -> bool:
    if record.get("status") not in (RunStatus.PREPARING, RunStatus.RUNNING):
        return False
    process = record.get("process", {})
    if process.get("host") != socket.gethostname():
        return False
    try:
        return psutil.Process(process["pid"]).create_time() == process["created"]
    except (KeyError, psutil.Error):
        return False


def _write_json(path: Path, value: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
