"""Trackers of other makers, as `report_to` names them: TensorBoard, W&B, MLflow, trackio.

A tracker shows what metrics.jsonl has, as train/<field> and eval/loss. It never ends a run: one
that is not installed, or that fails, is said once and left out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from fullshard.config.values import Tracker
from fullshard.observe.metrics import EvalRow, StepRow

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Names:
    """What a run is called in a tracker.

    Attributes:
        project: Common name of several runs.
        run: This run.
        folder: Of the run: where trackers keep their own files.
        logging_dir: Of TensorBoard's files.
        config: The run's configuration, as JSON could hold it.
    """

    project: str
    run: str
    folder: Path
    logging_dir: Path
    config: Mapping[str, Any]


class _Open(Protocol):
    """A run in a tracker."""

    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class _TensorBoard:
    def __init__(self, names: Names) -> None:
        import_module("tensorboard")  # torch's error does not name the package
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(names.logging_dir))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
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

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    def __init__(self, names: Names) -> None:
        self._mlflow = import_module("mlflow")
        self._mlflow.set_experiment(names.project)
        self._mlflow.start_run(run_name=names.run)
        self._mlflow.log_dict(dict(names.config), "config.json")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class _Trackio:
    def __init__(self, names: Names) -> None:
        self._trackio = import_module("trackio")
        self._trackio.init(project=names.project, name=names.run, config=dict(names.config))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        self._trackio.finish()


_OPENED: Mapping[Tracker, Callable[[Names], _Open]] = {
    Tracker.TENSORBOARD: _TensorBoard,
    Tracker.WANDB: _Wandb,
    Tracker.MLFLOW: _Mlflow,
    Tracker.TRACKIO: _Trackio,
}


class Trackers:
    """The trackers of a run, on rank 0.

    Args:
        asked: Those of `report_to`.
        names: What the run is called there.
    """

    def __init__(self, asked: Sequence[Tracker], names: Names) -> None:
        self._open: dict[Tracker, _Open] = {}
        for tracker in asked:
            try:
                self._open[tracker] = _OPENED[tracker](names)
            except ImportError:
                logger.warning(
                    "training.report_to: %s is not installed; metrics.jsonl and metrics.csv hold "
                    "what it would show",
                    tracker,
                )
            except Exception as error:  # noqa: BLE001  whatever it is, the run goes on
                self._leave(tracker, error)

    def write(self, row: StepRow | EvalRow) -> None:
        """Shows a row."""
        prefix = "train/" if isinstance(row, StepRow) else "eval/"
        values = {
            prefix + name.removeprefix("eval_"): value
            for name, value in asdict(row).items()
            if name != "step" and value is not None
        }
        for tracker, opened in list(self._open.items()):
            try:
                opened.log(values, row.step)
            except Exception as error:  # noqa: BLE001
                self._leave(tracker, error)

    def close(self) -> None:
        """Ends the run in all trackers."""
        for tracker, opened in list(self._open.items()):
            try:
                opened.close()
            except Exception as error:  # noqa: BLE001
                self._leave(tracker, error)

    def _leave(self, tracker: Tracker, error: Exception) -> None:
        self._open.pop(tracker, None)
        logger.warning(
            "training.report_to: %s failed and is left out: %s: %s",
            tracker,
            type(error).__name__,
            error,
        )
