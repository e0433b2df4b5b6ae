"""Receives the loop's rows: every rank keeps the last ones; rank 0 also prints and writes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Self

from fullshard.config.schema import RunConfig
from fullshard.observe.hang import watchdog
from fullshard.observe.metrics import (
    EvalRow,
    MetricsWriter,
    SampleRow,
    SaveRow,
    StepRow,
    keep_rows,
)
from fullshard.observe.trackers import Names, Trackers
from fullshard.run.console import RunConsole
from fullshard.run.folder import RunFolder
from fullshard.run.loop import Watcher


class RunWatcher(Watcher):
    """Keeps the last rows; on rank 0 it also shows and writes every row.

    Args:
        console: Console of rank 0; None on other ranks.
        folder: Folder of the run.
        done: Number of steps finished before; rows of later steps are removed, since they repeat.
        config: Configuration of the run, with its trackers.
        utilization: Model FLOPs utilization at one token per second, if known.

    Attributes:
        console: Console that prints the rows.
        step: Row of the last update; on rank 0 also from an earlier session.
        evaluation: Row of the last evaluation.
        num_tokens: Input tokens of this session's updates.
    """

    def __init__(
        self,
        console: RunConsole | None,
        folder: RunFolder,
        done: int,
        config: RunConfig,
        utilization: float | None = None,
    ) -> None:
        self.step: StepRow | None = None
        self.evaluation: EvalRow | None = None
        self.num_tokens = 0
        self.console = console
        self._done = done
        self._utilization = utilization
        self._metrics: MetricsWriter | None = None
        self._trackers: Trackers | None = None
        if console is not None:
            self.step, self.evaluation = keep_rows(folder.metrics, done)
            self._metrics = MetricsWriter(folder.metrics)
            training = config.training
            names = Names(
                project=training.project,
                run=training.run_name or folder.path.name,
                folder=folder.path,
                logging_dir=Path(training.logging_dir or folder.path / "tensorboard"),
                config=config.model_dump(mode="json"),
                done=done,
            )
            self._trackers = Trackers(training.report_to, names)

    def __enter__(self) -> Self:
        if self.console is not None:
            self.console.start(self._done)
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self.console is not None:
            self.console.stop()
        if self._metrics is not None and self._trackers is not None:
            self._metrics.close()
            self._trackers.close(is_good=error is None)

    def entered(self, phase: str, step: int) -> None:
        watchdog.phase(phase, step)

    def stepped(self, row: StepRow) -> None:
        self.num_tokens += round(row.tokens_per_s * row.step_time_s)
        if self.console is not None:
            if self._utilization is not None:
                row = replace(row, mfu=self._utilization * row.tokens_per_s)
            self._write(row)
            self.console.print_step(row)
        self.step = row

    def evaluated(self, row: EvalRow) -> None:
        if self.evaluation is not None and self.evaluation.step == row.step:
            return  # repeated only for the count of the patience
        self.evaluation = row
        if self.console is not None:
            self._write(row)
            self.console.print_evaluation(row)

    def saved(self, row: SaveRow) -> None:
        if self.console is not None:
            self._write(row)

    def sampled(self, row: SampleRow) -> None:
        if self.console is not None and self._metrics is not None:
            self._metrics.write(row)
            self.console.print_sample(row)

    def _write(self, row: StepRow | EvalRow | SaveRow) -> None:
        if self._metrics is not None and self._trackers is not None:
            self._metrics.write(row)
            self._trackers.write(row)

    def misses_evaluation(self, step: int) -> bool:
        """Whether the rows, on rank 0, end with that step and lack its held-out loss."""
        if self.step is None or self.step.step != step:
            return False
        return self.console is not None and (
            self.evaluation is None or self.evaluation.step != step
        )
