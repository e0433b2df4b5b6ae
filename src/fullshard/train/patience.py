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

    @property
    def is_lost(self) -> bool:
        """Whether the run should end."""
        return self._evaluations is not None and self._waited >= self._evaluations

    def see(self, loss: float) -> None:
        """Takes a held-out loss into account; it is the same on every rank."""
        if loss < self._best - self._threshold:
            self._best, self._waited = loss, 0
        elif self._evaluations is not None:
            self._waited += 1

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"best": self._best if math.isfinite(self._best) else None, "waited": self._waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint of the same run, which may be older than this."""
        best = state.get("best")
        self._best = math.inf if best is None else float(best)
        self._waited = int(state.get("waited", 0))
