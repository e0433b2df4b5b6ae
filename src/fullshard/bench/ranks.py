"""Runs a rank module of the benchmarks and gathers what its ranks wrote."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from fullshard.bench.job import result_file
from fullshard.errors import FullshardError
from fullshard.launch.spawn import run_local_ranks


class Writable(Protocol):
    """A job that its ranks find in their folder."""

    def write(self, folder: Path) -> None:
        """Writes the job where its ranks look for it."""
        ...


def run_ranks(
    module: str, job: Writable, num_ranks: int, *, what: str, timeout_s: float
) -> list[dict]:
    """Runs one group of ranks and returns what each of them measured.

    Args:
        module: is called with the folder that holds the job.
        job: what to measure.
        num_ranks: of this machine.
        what: names the group in an error, as in "bench step: the ranks of 29M".
        timeout_s: for the whole group.

    Raises:
        FullshardError: a rank failed; its own error has been shown.
    """
    with tempfile.TemporaryDirectory(prefix="fullshard-bench-") as name:
        folder = Path(name)
        job.write(folder)
        run_module(module, [str(folder)], num_ranks, folder, what=what, timeout_s=timeout_s)
        return [json.loads((folder / result_file(rank)).read_text()) for rank in range(num_ranks)]


def run_module(
    module: str,
    arguments: Sequence[str],
    num_ranks: int,
    folder: Path,
    *,
    what: str,
    timeout_s: float,
) -> None:
    """Runs one group of ranks, whose logs lie in the folder, to its end.

    Raises:
        FullshardError: a rank failed; its own error has been shown.
    """
    code = run_local_ranks(
        module,
        arguments,
        num_processes=num_ranks,
        log_dir=folder / "logs",
        timeout_s=timeout_s,
    )
    if code != 0:
        error = FullshardError(f"{what}: expected exit code 0, got {code}. See the error above.")
        error.exit_code = code
        raise error
