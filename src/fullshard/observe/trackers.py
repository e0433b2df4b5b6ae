"""External trackers, as `report_to` names them: TensorBoard, W&B, MLflow, trackio.

A tracker receives the values of metrics.jsonl, as train/<field> and eval/loss. It never ends a run:
one that is not installed, or that fails, is disabled with one warning.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from threading import Event, Thread
from typing import Any

from fullshard.config.schema import RunConfig
from fullshard.config.values import Tracker
from fullshard.observe.metrics import EvalRow, SaveRow, StepRow

logger = logging.getLogger(__name__)

POLL_S = 0.2
CLOSE_S = 60.0


# A tracker's functions for the values of a step (whose number is `step=`), and for the end of the
# run (whether it succeeded).
Log = Callable[..., Any]
Close = Callable[[bool], Any]


def _described(config: RunConfig, folder: Path) -> dict[str, Any]:
    """The names of the run's project and of the run, and its configuration."""
    project, name = config.training.project, config.training.run_name or folder.name
    return {"project": project, "name": name, "config": config.model_dump(mode="json")}


def _tensorboard(config: RunConfig, folder: Path, done: int) -> tuple[Log, Close]:
    import_module("tensorboard")  # torch's error does not name the package
    from torch.utils.tensorboard import SummaryWriter

    place = config.training.logging_dir or folder / "tensorboard"
    writer = SummaryWriter(str(place), purge_step=done + 1)

    def log(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return log, lambda _succeeded: writer.close()


def _wandb(config: RunConfig, folder: Path, _: int) -> tuple[Log, Close]:
    run = import_module("wandb").init(dir=str(folder), **_described(config, folder))
    return run.log, lambda succeeded: run.finish(exit_code=0 if succeeded else 1)


def _mlflow(config: RunConfig, folder: Path, _: int) -> tuple[Log, Close]:
    mlflow, facts = import_module("mlflow"), _described(config, folder)
    mlflow.set_experiment(facts["project"])
    mlflow.start_run(run_name=facts["name"])
    mlflow.log_dict(facts["config"], "config.json")
    return mlflow.log_metrics, lambda ok: mlflow.end_run("FINISHED" if ok else "FAILED")


def _trackio(config: RunConfig, folder: Path, _: int) -> tuple[Log, Close]:
    trackio = import_module("trackio")
    trackio.init(**_described(config, folder))
    return trackio.log, lambda _succeeded: trackio.finish()


OPEN: Mapping[Tracker, Callable[[RunConfig, Path, int], tuple[Log, Close]]] = {
    Tracker.TENSORBOARD: _tensorboard,
    Tracker.WANDB: _wandb,
    Tracker.MLFLOW: _mlflow,
    Tracker.TRACKIO: _trackio,
}


class Trackers:
    """The trackers of a run, on rank 0.

    A thread of their own opens, feeds and closes them, so training never waits for a server.

    Args:
        config: Configuration of the run, with its trackers, their names and folders.
        folder: Folder of the run, for the trackers' own files.
        done: Number of steps finished before; later steps are logged again.
    """

    def __init__(self, config: RunConfig, folder: Path, done: int) -> None:
        self._rows: queue.SimpleQueue[StepRow | EvalRow | SaveRow] = queue.SimpleQueue()
        self._ended = Event()
        self._is_good = False
        self._thread: Thread | None = None
        if config.training.report_to:
            self._thread = Thread(target=self._serve, args=(config, folder, done), daemon=True)
            self._thread.start()

    def write(self, row: StepRow | EvalRow | SaveRow) -> None:
        """Queues a row."""
        if self._thread is not None:
            self._rows.put(row)

    def close(self, *, is_good: bool) -> None:
        """Ends the run in all trackers; waits up to CLOSE_S seconds for queued rows.

        Args:
            is_good: Whether the run succeeded.
        """
        if self._thread is None:
            return
        self._is_good = is_good
        self._ended.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning("training.report_to: a tracker did not finish within %.0f s", CLOSE_S)

    def _serve(self, config: RunConfig, folder: Path, done: int) -> None:
        trackers: dict[Tracker, tuple[Log, Close]] = {}
        for tracker in config.training.report_to:
            with _left_out(tracker, trackers):
                trackers[tracker] = OPEN[tracker](config, folder, done)
        while not (self._ended.is_set() and self._rows.empty()):
            try:
                row = self._rows.get(timeout=POLL_S)
            except queue.Empty:
                continue
            for tracker, (log, _) in list(trackers.items()):
                with _left_out(tracker, trackers):
                    log(_shown(row), step=row.step)
        for tracker, (_, close) in list(trackers.items()):
            with _left_out(tracker, trackers):
                close(self._is_good)


def _shown(row: StepRow | EvalRow | SaveRow) -> dict[str, float]:
    prefix = "eval/" if isinstance(row, EvalRow) else "train/"
    return {
        prefix + name.removeprefix("eval_"): value
        for name, value in asdict(row).items()
        if name != "step" and value is not None
    }


@contextmanager
def _left_out(tracker: Tracker, trackers: dict[Tracker, tuple[Log, Close]]) -> Generator[None]:
    """Removes a tracker that fails, with a warning."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  the run continues after any error
        trackers.pop(tracker, None)
        if isinstance(error, ImportError) and error.name == tracker:
            what = "is not installed"
        else:
            what = f"failed and is disabled ({type(error).__name__}: {error})"
        what += "; metrics.jsonl and metrics.csv contain the same values"
        logger.warning("training.report_to: %s %s", tracker, what)
