"""Trackers of other makers, as `report_to` names them: TensorBoard, W&B, MLflow, trackio.

A tracker shows what metrics.jsonl has, as train/<field> and eval/loss. It never ends a run: one
that is not installed, or that fails, is said once and left out.
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
from typing import Any, Protocol

from fullshard.config.values import Tracker
from fullshard.observe.metrics import EvalRow, SaveRow, StepRow

logger = logging.getLogger(__name__)

QUEUED = 10_000  # rows
POLL_S = 0.2
CLOSE_S = 60.0


@dataclass(frozen=True)
class Names:
    """What a run is called in a tracker.

    Attributes:
        project: Common name of several runs.
        run: This run.
        folder: Folder of the run: where trackers keep their own files.
        logging_dir: Folder of TensorBoard's files.
        config: The run's configuration, as JSON could hold it.
        done: Steps that were finished before: later ones are shown anew.
    """

    project: str
    run: str
    folder: Path
    logging_dir: Path
    config: Mapping[str, Any]
    done: int = 0


class _Open(Protocol):
    """A run in a tracker."""

    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self, *, is_good: bool) -> None: ...


class _TensorBoard:
    def __init__(self, names: Names) -> None:
        import_module("tensorboard")  # torch's error does not name the package
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(names.logging_dir), purge_step=names.done + 1)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, is_good: bool) -> None:  # noqa: ARG002  it knows no status
        self._writer.close()


class _Wandb:
    def __init__(self, names: Names) -> None:
        wandb = import_module("wandb")
        self._run = wandb.init(
            project=names.project,
            name=names.run,
            dir=str(names.folder),
            config=dict(names.config),
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self, *, is_good: bool) -> None:
        self._run.finish(exit_code=0 if is_good else 1)


class _Mlflow:
    def __init__(self, names: Names) -> None:
        self._mlflow = import_module("mlflow")
        self._mlflow.set_experiment(names.project)
        self._mlflow.start_run(run_name=names.run)
        self._mlflow.log_dict(dict(names.config), "config.json")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self, *, is_good: bool) -> None:
        self._mlflow.end_run("FINISHED" if is_good else "FAILED")


class _Trackio:
    def __init__(self, names: Names) -> None:
        self._trackio = import_module("trackio")
        self._trackio.init(project=names.project, name=names.run, config=dict(names.config))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._trackio.log(dict(values), step=step)

    def close(self, *, is_good: bool) -> None:  # noqa: ARG002  it knows no status
        self._trackio.finish()


_OPENED: Mapping[Tracker, Callable[[Names], _Open]] = {
    Tracker.TENSORBOARD: _TensorBoard,
    Tracker.WANDB: _Wandb,
    Tracker.MLFLOW: _Mlflow,
    Tracker.TRACKIO: _Trackio,
}


class Trackers:
    """The trackers of a run, on rank 0.

    They are opened, fed and closed by a thread of their own: the other ranks do not wait for one
    that waits for its server. Rows that come faster than they are taken are left out, and counted.

    Args:
        asked: Those of `report_to`.
        names: What the run is called there.
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
        """Shows a row, soon."""
        if self._thread is None:
            return
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self._num_lost += 1

    def close(self, *, is_good: bool) -> None:
        """Ends the run in all trackers, once they have what they can take in CLOSE_S seconds.

        Args:
            is_good: Whether it ended as it should.
        """
        if self._thread is None:
            return
        self._is_good = is_good
        self._ended.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning("training.report_to: a tracker did not end in %.0f s", CLOSE_S)
        if self._num_lost:
            logger.warning("training.report_to: %d rows came too fast", self._num_lost)

    def _serve(self, asked: Sequence[Tracker], names: Names) -> None:
        trackers: dict[Tracker, _Open] = {}
        for tracker in asked:
            with _left_out(tracker, trackers):
                trackers[tracker] = _OPENED[tracker](names)
        while not (self._ended.is_set() and self._rows.empty()):
            try:
                row = self._rows.get(timeout=POLL_S)
            except queue.Empty:
                continue
            for tracker, opened in list(trackers.items()):
                with _left_out(tracker, trackers):
                    opened.log(_shown(row), row.step)
        for tracker, opened in list(trackers.items()):
            with _left_out(tracker, trackers):
                opened.close(is_good=self._is_good)


def _shown(row: StepRow | EvalRow | SaveRow) -> dict[str, float]:
    prefix = "eval/" if isinstance(row, EvalRow) else "train/"
    return {
        prefix + name.removeprefix("eval_"): value
        for name, value in asdict(row).items()
        if name != "step" and value is not None
    }


@contextmanager
def _left_out(tracker: Tracker, trackers: dict[Tracker, _Open]) -> Generator[None]:
    """A tracker that fails is said, and is no longer there."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  whatever it is, the run goes on
        trackers.pop(tracker, None)
        if isinstance(error, ImportError) and error.name == tracker:
            what = "is not installed"
        else:
            what = f"failed and is left out ({type(error).__name__}: {error})"
        logger.warning(
            "training.report_to: %s %s; metrics.jsonl and metrics.csv hold what it would show",
            tracker,
            what,
        )
