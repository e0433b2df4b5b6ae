"""What a finished run leaves: its model, a sample, its record, its report."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from fullshard.data.bigram import Baseline
from fullshard.data.dataset import DatasetFacts
from fullshard.engine.hugging_face import import_code
from fullshard.models.generate import Sample
from fullshard.observe.metrics import EvalRow, StepRow, memory_bytes
from fullshard.observe.report import write_report
from fullshard.planner.arrays import ArraysPlan
from fullshard.planner.plan import Plan
from fullshard.planner.text import human_bytes
from fullshard.run.console import RunConsole
from fullshard.run.folder import RunFolder, RunStatus, now
from fullshard.run.outlook import View
from fullshard.run.schedule import StepPlan
from fullshard.run.watcher import RunWatcher

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from fullshard.run.xla_outlook import XlaOutlook


@dataclass(frozen=True)
class Result:
    """How a run went.

    Attributes:
        step: The last update.
        evaluation: The last held-out loss; None where nothing is held out.
        baseline: The bigram's loss over the same held-out tokens.
        wall_s: From the start of the ranks to the end of the loop.
        num_tokens: Input tokens of all updates.
        average_loss: Held-out loss of the averaged weights; None where there are none.
        stopped_early: Whether held-out losses no longer got better.
    """

    step: StepRow
    evaluation: EvalRow | None
    baseline: Baseline | None
    wall_s: float
    num_tokens: int
    average_loss: float | None = None
    stopped_early: bool = False

    def measured(self) -> dict[str, Any]:
        """For run.json."""
        return {
            "num_steps": self.step.step,
            "train_loss": self.step.loss,
            "eval_loss": self.evaluation.eval_loss if self.evaluation else None,
            "ema_eval_loss": self.average_loss,
            "stopped_early": self.stopped_early,
            "baseline_loss": self.baseline.nats if self.baseline else None,
            "baseline_weight": self.baseline.weight if self.baseline else None,
            "num_held_out_tokens": self.baseline.num_tokens if self.baseline else None,
            "num_tokens": self.num_tokens,
            "tokens_per_s": self.num_tokens / self.wall_s,
            "memory_peak_bytes": self.step.memory_peak_bytes,
            "wall_s": self.wall_s,
        }


def planned(view: View | XlaOutlook, steps: StepPlan | None = None) -> dict[str, Any]:
    """For run.json: what the plan said before the run.

    Args:
        view: The run as the planner sees it.
        steps: Steps of the run; None: the run was refused before its data was read.
    """
    plan = view.plan
    outlook = view.outlook if isinstance(view, View) else None
    found: dict[str, Any] = {
        "digest": plan.digest(),
        "world_size": plan.mesh.world_size,
        "num_parameters": plan.num_parameters,
        "num_units": plan.num_units,
        "peak_bytes": plan.peak_bytes,
        "expected_peak_bytes": outlook.peak_bytes["device"] if outlook else None,
        "expected_step_time_s": outlook.step_time_s if outlook else None,
        "expected_tokens_per_s": outlook.tokens_per_s if outlook else None,
        "expected_wait_s": outlook.times.exposed if outlook and outlook.times else None,
        "whole_logits": view.whole_logits if isinstance(view, View) else None,
        "measures_process": not torch.cuda.is_available(),  # see `_memory`
        "rows": plan.rows(),
    }
    if steps is None:
        return found
    found["rows"] += _staging(plan, steps)
    shape = steps.order.shape
    return {**found, "num_steps": steps.num_steps, "samples_per_step": shape.global_batch}


def _staging(plan: Plan | ArraysPlan, steps: StepPlan) -> list[dict[str, Any]]:
    """The copy on the host from which a checkpoint is written while training goes on."""
    if steps.save_every is None:
        return []
    return [{"name": "checkpoint staging (host)", "bytes": plan.staging_bytes}]


def mark_running(folder: RunFolder, device: torch.device, model_config: PretrainedConfig) -> None:
    """For run.json, on rank 0 before the model is built: what the process takes without it."""
    import_code(model_config)  # it is no tensor either
    record = folder.read_record()
    before = memory_bytes(device)[0] if device.type == "cpu" else 0
    folder.update_record(
        status=RunStatus.RUNNING,
        planned={**record["planned"], "process_bytes": before},
        environment=environment(),
    )


def environment() -> dict[str, str]:
    """For run.json: what the run ran on."""
    packages = ("fullshard", "torch", "transformers", "tokenizers", "numpy", "jax")
    found = {package: _version(package) for package in packages}
    return {"python": platform.python_version(), "platform": platform.platform(), **found}


def conclude(
    folder: RunFolder,
    watcher: RunWatcher,
    facts: DatasetFacts,
    sample: Sample,
    wall_s: float,
    average_loss: float | None = None,
) -> None:
    """On rank 0, once model/ is written: writes and shows what came of it.

    Args:
        folder: Folder of the run, with its model.
        watcher: Has the last rows, and the console.
        facts: Facts of the data: the baseline.
        sample: What the model writes.
        wall_s: Since the ranks began.
        average_loss: Held-out loss of the averaged weights (ema_decay).
    """
    console = watcher.console
    assert watcher.step is not None, "a run has at least one step"
    assert console is not None, "rank 0 has one"
    result = Result(
        watcher.step,
        watcher.evaluation,
        facts.baseline,
        wall_s,
        watcher.num_tokens,
        average_loss,
        stopped_early=watcher.step.step < folder.read_record()["planned"]["num_steps"],
    )
    _finish(folder, result, sample)
    _print_result(console, folder, result, sample)


def _finish(folder: RunFolder, result: Result, sample: Sample) -> None:
    """Writes sample, record and report."""
    folder.sample.write_text(sample.text + "\n", encoding="utf-8")
    folder.update_record(
        status=RunStatus.FINISHED, exit_code=0, ended=now(), measured=result.measured()
    )
    write_report(folder.path)


def _print_result(console: RunConsole, folder: RunFolder, result: Result, sample: Sample) -> None:
    """Shows the held-out loss beside the baseline, a sample, and where everything lies."""
    console.print_text("")
    if result.stopped_early:
        better = "no longer better (training.early_stopping_patience)"
        console.print_facts([("ended", f"after step {result.step.step}: losses {better}", "")])
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
    if result.average_loss is not None:
        text = f"{result.average_loss:.4f} nats a token (in {folder.model_ema})"
        console.print_facts([("average's loss", text, "")])
    console.print_text(f"\n{sample.text}\n")
    speed = result.num_tokens / result.wall_s
    console.print_facts(
        [
            ("time", f"{result.wall_s:.0f} s, {speed:,.0f} tokens/s", ""),
            ("memory", _memory(folder, result), ""),
            ("report", str(folder.report), ""),
            ("model", f"{folder.model}  (fullshard generate {folder.path})", ""),
        ]
    )


def _memory(folder: RunFolder, result: Result) -> str:
    """Planned beside measured, like with like: on a CPU the whole process is measured."""
    planned = folder.read_record()["planned"]
    expected, before = planned["expected_peak_bytes"], planned.get("process_bytes", 0)
    measured = f"measured {human_bytes(result.step.memory_peak_bytes)} a rank"
    if before:
        measured += " (the whole process)"
    if expected is None:  # the compiler lays out what is no state
        return measured
    told = f"planned {human_bytes(expected)} of tensors"
    if before:
        told += f" + {human_bytes(before)} that the process took before the model was built"
        told += f" = {human_bytes(expected + before)}"
    return f"{told}; {measured}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
