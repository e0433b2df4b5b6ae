"""Measurements of one rank of `python -m benchmarks.compile`."""

from __future__ import annotations

import warnings
from typing import Any

from torch._dynamo.utils import counters

from benchmarks.compile import Job
from fullshard.bench.engines import BUILDERS, GPT, Feeder, Setup, timed_by_all


class CompiledSetup(Setup):
    """Compiles every block before an engine sees it."""

    backend = "inductor"

    def model(self) -> GPT:
        """Builds the model, whose blocks compile in place."""
        model = super().model()
        for block in model.blocks:
            block.compile(backend=self.backend)
        return model


def num_compiled() -> int:
    """Returns how many graphs this process has compiled."""
    return counters["stats"]["unique_graphs"]


def measure(job: Job) -> dict[str, Any]:
    """Times every engine eager and compiled, in turn."""
    warnings.simplefilter("ignore")  # the compiler's, of its own imports
    CompiledSetup.backend = job.backend
    feeders: dict[str, Feeder] = {}
    losses, graphs = {}, {}
    for name in job.engines:
        for kind in (Setup, CompiledSetup):
            key = f"{name} compiled" if kind is CompiledSetup else name
            before = num_compiled()
            feeders[key] = Feeder(job.case, BUILDERS[name](kind(job.case, 0, 1e-3)))
            losses[key] = [feeders[key].mean_loss() for _ in range(job.num_checked)]
            graphs[key] = num_compiled() - before
    before = num_compiled()
    times: dict[str, list[float]] = {key: [] for key in feeders}
    for i in range(job.num_rounds):
        turn = i % len(feeders)
        for key in [*feeders][turn:] + [*feeders][:turn]:
            times[key].append(timed_by_all(feeders[key].step)[0])
    recompiled = num_compiled() - before
    return {"times": times, "losses": losses, "graphs": graphs, "recompiled": recompiled}
