"""When a run ends before its last step: evaluations in a row that were not better."""

from __future__ import annotations

import math
from typing import Any


class Patience:
    """Counts evaluations without a better held-out loss.

    Args:
        evaluations: In a row, after which it is lost; None: never, and nothing is counted.
        threshold: By how much a loss must be below the best one, in nats.
    """

    def __init__(self, evaluations: int | None = None, threshold: float = 0.0) -> None:
        self._evaluations = evaluations
        self._threshold = threshold
        self._best = math.inf
        self._waited = 0
        self._step: int | None = 0

    @property
    def is_lost(self) -> bool:
        """Whether the run should end."""
        return self._evaluations is not None and self._waited >= self._evaluations

    def lacks(self, step: int) -> bool:
        """Whether the held-out loss after that step was never taken into account."""
        return self._evaluations is not None and self._step is not None and self._step < step

    def see(self, loss: float, step: int) -> None:
        """Takes the held-out loss after a step into account; it is the same on every rank."""
        self._step = step
        if loss < self._best - self._threshold:
            self._best, self._waited = loss, 0
        elif self._evaluations is not None:
            self._waited += 1

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        best = self._best if math.isfinite(self._best) else None
        return {"best": best, "waited": self._waited, "step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint of the same run, which may be older than this.

        Where it does not say which evaluation was the last, none is lacking.
        """
        best = state.get("best")
        self._best = math.inf if best is None else float(best)
        self._waited = int(state.get("waited", 0))
        step = state.get("step")
        self._step = None if step is None else int(step)
