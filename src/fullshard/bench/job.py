"""The order that the command gives to a group of ranks, and the files that they exchange."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from fullshard.bench.cases import Case

JOB_FILE = "job.json"


def result_file(rank: int) -> str:
    """Names the file in which a rank leaves what it measured."""
    return f"rank_{rank}.json"


@dataclass(frozen=True)
class Job:
    """What one group of ranks measures.

    Attributes:
        mode: "time" (all engines in turn) or "memory" (one engine alone).
        num_checked: first steps, whose losses are compared; they warm up as well.
        num_rounds: timed steps of every engine.
        prefetch: FSDP2's prefetch distance by engine name; None: a pilot chooses it.
    """

    case: Case
    engines: tuple[str, ...]
    mode: str
    num_rounds: int
    num_checked: int = 3
    seed: int = 0
    learning_rate: float = 1e-3
    prefetch: dict[str, int] | None = None

    def write(self, folder: Path) -> None:
        """Writes the job where its ranks look for it."""
        (folder / JOB_FILE).write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(folder: Path) -> Job:
        """Reads what `write` wrote."""
        fields = json.loads((folder / JOB_FILE).read_text())
        case = Case(**fields.pop("case"))
        return Job(case=case, engines=tuple(fields.pop("engines")), **fields)
