"""External trackers, as `report_to` names them: TensorBoard, W&B, MLflow, trackio.

A tracker gets the values of metrics.jsonl, as train/<field> and eval/loss. It never ends a run: one
that is not installed, or that fails, is disabled with one warning.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from threading import Event, Thread
from typing import Any

from fullshard.config.values import Tracker
from fullshard.observe.metrics import EvalRow, SaveRow, StepRow

logger = logging.getLogger(__name__)

QUEUED = 10_000  # rows
POLL_S = 0.2
CLOSE_S = 60.0


@dataclass(frozen=True)
class Names:
    """Names and folders of a run in a tracker.

    Attributes:
        project: Name of the project, shared by several runs.
        run: Name of the run.
        folder: Folder of the run, for the tracker's own files.
        logging_dir: Folder for TensorBoard's files.
        config: The run's configuration, as JSON values.
        done: Number of steps finished before; later steps are logged again.
    """

    project: str
    run: str
    folder: Path
    logging_dir: Path
    config: Mapping[str, Any]
    done: int = 0


# What a tracker does with the values of a step (whose number is `step=`), and with the end of the
# run (whether it succeeded).
Log = Callable[..., Any]
Close = Callable[[bool], Any]


def _tensorboard(names: Names) -> tuple[Log, Close]:
    import_module("tensorboard")  # torch's error does not name the package
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(names.logging_dir), purge_step=names.done + 1)

    def log(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return log, lambda _succeeded: writer.close()


def _wandb(names: Names) -> tuple[Log, Close]:
    folder, config = str(names.folder), dict(names.config)
    wandb = import_module("wandb")
    run = wandb.init(project=names.project, name=names.run, dir=folder, config=config)
    return run.log, lambda succeeded: run.finish(exit_code=0 if succeeded else 1)


def _mlflow(names: Names) -> tuple[Log, Close]:
    mlflow = import_module("mlflow")
    mlflow.set_experiment(names.project)
    mlflow.start_run(run_name=names.run)
    mlflow.log_dict(dict(names.config), "config.json")
    return mlflow.log_metrics, lambda ok: mlflow.end_run("FINISHED" if ok else "FAILED")


def _trackio(names: Names) -> tuple[Log, Close]:
    trackio = import_module("trackio")
    trackio.init(project=names.project, name=names.run, config=dict(names.config))
    return trackio.log, lambda _succeeded: trackio.finish()


OPEN: Mapping[Tracker, Callable[[Names], tuple[Log, Close]]] = {
    Tracker.TENSORBOARD: _tensorboard,
    Tracker.WANDB: _wandb,
    Tracker.MLFLOW: _mlflow,
    Tracker.TRACKIO: _trackio,
}


class Trackers:
    """The trackers of a run, on rank 0.

    A thread of their own opens, feeds and closes them, so training never waits for a server. Rows
    that arrive faster than a tracker takes them are dropped and counted.

    Args:
        asked: Trackers of `report_to`.
        names: Names and folders of the run.
    """

    def __init__(self, asked: Sequence[Tracker], names: Names) -> None:
        self._rows: queue.Queue[StepRow | EvalRow | SaveRow] = queue.Queue(QUEUED)
        self._num_lost = 0
        self._ended = Event()
        self._is_good = False
        self._thread: Thread | None = None
        if asked:
            self._thread = Thread(target=self._serve, args=(asked, names), daemon=True)
            self._thread.start()

    def write(self, row: StepRow | EvalRow | SaveRow) -> None:
        """Queues a row."""
        if self._thread is None:
            return
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self._num_lost += 1

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
            logger.warning("training.report_to: a tracker did not end in %.0f s", CLOSE_S)
        if self._num_lost:
            lost = "training.report_to: %d rows were dropped because they arrived too fast"
            logger.warning(lost, self._num_lost)

    def _serve(self, asked: Sequence[Tracker], names: Names) -> None:
        trackers: dict[Tracker, tuple[Log, Close]] = {}
        for tracker in asked:
            with _left_out(tracker, trackers):
                trackers[tracker] = OPEN[tracker](names)
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
    except Exception as error:  # noqa: BLE001  whatever it is, the run goes on
        trackers.pop(tracker, None)
        if isinstance(error, ImportError) and error.name == tracker:
            what = "is not installed"
        else:
            what = f"failed and is disabled ({type(error).__name__}: {error})"
        what += "; metrics.jsonl and metrics.csv contain the same values"
        logger.warning("training.report_to: %s %s", tracker, what)
