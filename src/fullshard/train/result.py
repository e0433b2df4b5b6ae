"""What a finished run leaves: its model, a sample, its record, its report."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from fullshard.observe.metrics import EvalRow, StepRow
from fullshard.observe.report import write_report
from fullshard.planner.plan import Plan
from fullshard.train.baseline import Baseline
from fullshard.train.console import RunConsole
from fullshard.train.generate import Sample
from fullshard.train.prepare import StepPlan
from fullshard.train.run_folder import RunFolder, RunStatus, now


@dataclass(frozen=True)
class Result:
    """How a run went.

    Attributes:
        step: The last update.
        evaluation: The last held-out loss; None where nothing is held out.
        baseline: The bigram's loss over the same held-out tokens.
        wall_s: From the start of the ranks to the end of the loop.
        num_tokens: Input tokens of all updates.
    """

    step: StepRow
    evaluation: EvalRow | None
    baseline: Baseline | None
    wall_s: float
    num_tokens: int

    def measured(self) -> dict[str, Any]:
        """For run.json."""
        return {
            "num_steps": self.step.step,
            "train_loss": self.step.loss,
            "eval_loss": self.evaluation.eval_loss if self.evaluation else None,
            "baseline_loss": self.baseline.nats if self.baseline else None,
            "baseline_weight": self.baseline.weight if self.baseline else None,
            "num_held_out_tokens": self.baseline.num_tokens if self.baseline else None,
            "num_tokens": self.num_tokens,
            "tokens_per_s": self.num_tokens / self.wall_s,
            "memory_peak_bytes": self.step.memory_peak_bytes,
            "wall_s": self.wall_s,
        }


def planned(plan: Plan, steps: StepPlan) -> dict[str, Any]:
    """For run.json: what the plan said before the run."""
    return {
        "world_size": plan.mesh.world_size,
        "num_parameters": plan.num_parameters,
        "num_units": len(plan.units),
        "peak_bytes": plan.peak_bytes,
        "rows": plan.rows(),
        "num_steps": steps.num_steps,
        "samples_per_step": steps.order.shape.global_batch,
    }


def environment() -> dict[str, str]:
    """For run.json: what the run ran on."""
    packages = ("fullshard", "torch", "transformers", "tokenizers", "numpy")
    found = {package: _version(package) for package in packages}
    return {"python": platform.python_version(), "platform": platform.platform(), **found}


def finish(folder: RunFolder, result: Result, sample: Sample) -> None:
    """Writes sample, record and report."""
    folder.sample.write_text(sample.text + "\n", encoding="utf-8")
    folder.update_record(
        status=RunStatus.FINISHED, exit_code=0, ended=now(), measured=result.measured()
    )
    write_report(folder.path)


def print_result(console: RunConsole, folder: RunFolder, result: Result, sample: Sample) -> None:
    """Shows the held-out loss beside the baseline, a sample, and where everything lies."""
    console.print_text("")
    if result.evaluation is not None and result.baseline is not None:
        loss, nats = result.evaluation.eval_loss, result.baseline.nats
        beaten = loss < nats
        verdict = f"beaten by {nats - loss:.3f}" if beaten else "not beaten"
        console.print_facts(
            [
                ("held-out loss", f"{loss:.4f} nats a token", "bold"),
                (
                    "bigram baseline",
                    f"{nats:.4f} nats a token (interpolated, lambda {result.baseline.weight:.2f}, "
                    f"the same {result.baseline.num_tokens:,} tokens): {verdict}",
                    "green" if beaten else "red",
                ),
            ]
        )
    console.print_text(f"\n{sample.text}\n")
    speed = result.num_tokens / result.wall_s
    console.print_facts(
        [
            ("time", f"{result.wall_s:.0f} s, {speed:,.0f} tokens/s", ""),
            ("report", str(folder.report), ""),
            ("model", f"{folder.model}  (fullshard generate {folder.path})", ""),
        ]
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
