"""Where the loop's rows go: remembered on every rank; on rank 0 also shown and written."""

from __future__ import annotations

from typing import Self

from fullshard.observe import watchdog
from fullshard.observe.metrics import EvalRow, MetricsWriter, StepRow, keep_rows
from fullshard.train.console import RunConsole
from fullshard.train.run_folder import RunFolder


class RunWatcher:
    """A Watcher of the loop.

    Args:
        console: Of rank 0; None on the others.
        folder: Of the run.
        done: Steps that were finished before; rows of later ones, which will be taken again, go.

    Attributes:
        step: The last update's row, on rank 0 also that of an earlier session.
        evaluation: The last evaluation's.
        num_tokens: Input tokens of this session's updates.
    """

    def __init__(self, console: RunConsole | None, folder: RunFolder, done: int) -> None:
        self.step: StepRow | None = None
        self.evaluation: EvalRow | None = None
        self.num_tokens = 0
        self._console = console
        self._done = done
        self._metrics = None
        if console is not None:
            self.step, self.evaluation = keep_rows(folder.metrics, done)
            self._metrics = MetricsWriter(folder.metrics)

    def __enter__(self) -> Self:
        if self._console is not None:
            self._console.start(self._done)
        return self

    def __exit__(self, *_: object) -> None:
        if self._console is not None and self._metrics is not None:
            self._console.stop()
            self._metrics.close()

    def entered(self, phase: str, step: int) -> None:
        watchdog.phase(phase, step)

    def stepped(self, row: StepRow) -> None:
        self.step = row
        self.num_tokens += round(row.tokens_per_s * row.step_time_s)
        if self._console is not None and self._metrics is not None:
            self._metrics.write(row)
            self._console.print_step(row)

    def evaluated(self, row: EvalRow) -> None:
        self.evaluation = row
        if self._console is not None and self._metrics is not None:
            self._metrics.write(row)
            self._console.print_evaluation(row)

    def misses_evaluation(self, step: int) -> bool:
        """Whether the rows, which rank 0 has, end with that step and lack its held-out loss."""
        if self.step is None or self.step.step != step:
            return False
        return self._console is not None and (
            self.evaluation is None or self.evaluation.step != step
        )
