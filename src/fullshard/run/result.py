"""The results of a run, in run.json and on the console."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import torch

from fullshard.engine.hugging_face import import_code
from fullshard.launch.machine import describe_versions
from fullshard.models.generate import Sample
from fullshard.observe.metrics import StepRow, memory_bytes, process_bytes
from fullshard.observe.report import write_report
from fullshard.outlook.memory import RANK_PROCESS
from fullshard.planner.text import human_bytes
from fullshard.run.console import RunConsole, RunWatcher
from fullshard.run.folder import RunFolder, RunStatus, now
from fullshard.run.outlook import View
from fullshard.run.schedule import StepPlan

if TYPE_CHECKING:
    from fullshard.run.session import Session
    from fullshard.run.xla_outlook import XlaOutlook


PACKAGES = ("fullshard", "torch", "transformers", "tokenizers", "numpy", "jax")


def planned(view: View | XlaOutlook, steps: StepPlan | None = None) -> dict[str, Any]:
    """For run.json: the plan and its forecast.

    Args:
        view: Plan of the run.
        steps: Steps of the run; None if it was refused before its data was read.
    """
    plan = view.plan
    outlook = view.outlook if isinstance(view, View) else None
    found: dict[str, Any] = {
        "digest": plan.digest(),
        "world_size": plan.mesh.world_size,
        "num_parameters": plan.num_parameters,
        "num_units": plan.num_units,
        "peak_bytes": plan.peak_bytes,
        "expected_peak_bytes": outlook.memory_bytes if outlook else None,
        "expected_step_time_s": outlook.step_time_s if outlook else None,
        "expected_tokens_per_s": outlook.tokens_per_s if outlook else None,
        "expected_wait_s": outlook.times.exposed if outlook and outlook.times else None,
        "whole_logits": view.whole_logits if isinstance(view, View) else None,
        "measures_process": not torch.cuda.is_available(),  # see `_memory`
        "rows": plan.rows(),
    }
    if steps is None:
        return found
    if steps.save_every is not None:  # a checkpoint is written from a copy while training goes on
        found["rows"] += [{"name": "checkpoint staging (host)", "bytes": plan.staging_bytes}]
    shape = steps.order.shape
    return {**found, "num_steps": steps.num_steps, "samples_per_step": shape.global_batch}


def mark_running(session: Session) -> None:
    """Records that the run is running, and what its process takes beside the model's tensors.

    It is often more than the process has now: libraries allocate in the first step, too.
    """
    import_code(session.model_config)  # its memory does not belong to the model's tensors
    before = max(process_bytes(), RANK_PROCESS) if session.seat.device.type == "cpu" else 0
    foreseen = {**session.folder.read_record()["planned"], "process_bytes": before}
    running, versions = RunStatus.RUNNING, environment()
    session.folder.update_record(status=running, planned=foreseen, environment=versions)


def environment() -> dict[str, str]:
    """For run.json: versions of Python, the platform and the libraries."""
    missing = dict.fromkeys(PACKAGES, "not installed")
    return {"platform": platform.platform(), **missing, **describe_versions(PACKAGES)}


def conclude(
    session: Session, watcher: RunWatcher, sample: Sample, wall_s: float, average_loss: float | None
) -> None:
    """On rank 0, once model/ is written: writes and shows the results of a run.

    Args:
        session: The run.
        watcher: Holds the last rows and the console.
        sample: Text sampled from the trained model.
        wall_s: Seconds since the ranks began.
        average_loss: Held-out loss of the averaged weights (ema_decay), if any.
    """
    folder, baseline = session.folder, session.dataset.facts.baseline
    done, memory = session.steps.num_steps, memory_bytes(session.seat.device)
    # A run that was killed after its last step may have lost its rows.
    last = watcher.step or StepRow(done, 0, None, None, 0, 0, 0, 0, 0, 0, 0, *memory)
    measured = {
        "num_steps": last.step,
        "train_loss": last.loss,
        "eval_loss": watcher.evaluation.eval_loss if watcher.evaluation else None,
        "ema_eval_loss": average_loss,
        "stopped_early": last.step < folder.read_record()["planned"]["num_steps"],
        "baseline_loss": baseline.nats if baseline else None,
        "baseline_weight": baseline.weight if baseline else None,
        "num_held_out_tokens": baseline.num_tokens if baseline else None,
        "num_tokens": watcher.num_tokens,
        "tokens_per_s": watcher.num_tokens / wall_s or None,  # None: all steps were done before
        "memory_peak_bytes": last.memory_peak_bytes,
        "wall_s": wall_s,
    }
    folder.sample.write_text(sample.text + "\n", encoding="utf-8")
    folder.update_record(status=RunStatus.FINISHED, exit_code=0, ended=now(), measured=measured)
    write_report(folder.path)
    _print_result(watcher.console, folder, measured, sample)


def _print_result(
    console: RunConsole, folder: RunFolder, measured: dict[str, Any], sample: Sample
) -> None:
    """Shows the held-out loss next to the baseline, the sample, and where the files are."""
    console.print_text("")
    if measured["stopped_early"]:
        why = "losses no longer better (training.early_stopping_patience)"
        console.print_facts([("ended", f"after step {measured['num_steps']}: {why}", "")])
    loss, nats = measured["eval_loss"], measured["baseline_loss"]
    if loss is not None and nats is not None:
        verdict = f"beaten by {nats - loss:.3f}" if loss < nats else "not beaten"
        baseline = (
            f"{nats:.4f} nats a token (interpolated, lambda {measured['baseline_weight']:.2f}, the "
            f"same {measured['num_held_out_tokens']:,} tokens): {verdict}"
        )
        held_out = ("held-out loss", f"{loss:.4f} nats a token", "bold")
        color = "green" if loss < nats else "red"
        console.print_facts([held_out, ("bigram baseline", baseline, color)])
    if measured["ema_eval_loss"] is not None:
        text = f"{measured['ema_eval_loss']:.4f} nats a token (in {folder.model_ema})"
        console.print_facts([("average's loss", text, "")])
    console.print_text(f"\n{sample.text}\n")
    rate = measured["tokens_per_s"]
    speed = f"{rate:,.0f} tokens/s" if rate else "no step left to train"
    console.print_facts(
        [
            ("time", f"{measured['wall_s']:.0f} s, {speed}", ""),
            ("memory", _memory(folder, measured["memory_peak_bytes"]), ""),
            ("report", str(folder.report), ""),
            ("model", f"{folder.model}  (fullshard generate {folder.path})", ""),
        ]
    )


def _memory(folder: RunFolder, peak_bytes: int) -> str:
    """Planned and measured memory; on a CPU that of the process, without pages of files."""
    planned = folder.read_record()["planned"]
    expected, before = planned["expected_peak_bytes"], planned.get("process_bytes", 0)
    measured = f"measured {human_bytes(peak_bytes)} a rank"
    if before:
        measured += " (without pages of files, which the kernel drops when memory is short)"
    if expected is None:  # the compiler lays out everything but the state
        return measured
    told = f"planned {human_bytes(expected)} of tensors"
    if before:
        told += f" + {human_bytes(before)} of the process = {human_bytes(expected + before)}"
    return f"{told}; {measured}"
