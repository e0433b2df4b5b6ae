"""The console of a run (banner, step lines, progress bar), the rows that it shows, the result.

Only rank 0 has a console. On a terminal a progress bar with the time left stays below the lines;
elsewhere only plain lines are printed.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from fullshard.config import host_memory
from fullshard.config.schema import RunConfig
from fullshard.data.dataset import DatasetFacts
from fullshard.engine.hugging_face import import_code
from fullshard.errors import ConfigError, printable
from fullshard.launch.machine import describe_versions
from fullshard.models.build import weights_folder
from fullshard.models.generate import Sample
from fullshard.observe.metrics import (
    AnyRow,
    EvalRow,
    MetricsWriter,
    SampleRow,
    StepRow,
    keep_rows,
    memory_bytes,
    process_bytes,
)
from fullshard.observe.report import write_report
from fullshard.observe.trackers import Trackers
from fullshard.outlook.memory import RANK_PROCESS, WORKSPACES
from fullshard.planner.plan import Plan
from fullshard.planner.text import axes_of, contracts, human_bytes, padding
from fullshard.run.folder import RunFolder, RunStatus, now
from fullshard.run.loop import Watcher
from fullshard.run.optim import StepPlan
from fullshard.run.outlook import View

if TYPE_CHECKING:
    from fullshard.run.session import Session
    from fullshard.run.xla_outlook import XlaOutlook


LABEL_WIDTH = 10
SAMPLE_WIDTH = 160


class RunConsole:
    """Prints the progress of a run on rank 0."""

    def __init__(self, num_steps: int, log_every: int, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._num_steps = num_steps
        self._log_every = log_every
        self._window: list[StepRow] = []
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def print_banner(self, title: str, facts: Sequence[tuple[str, str]]) -> None:
        """Prints labelled lines about the run; on a terminal they are wrapped in a table."""
        self._console.print(Text(title, style="bold"))
        if self._console.is_terminal:
            grid = Table.grid(padding=(0, 2))
            grid.add_column(style="cyan", no_wrap=True)
            grid.add_column()
            for name, value in facts:
                grid.add_row(f"  {name}", Text(value))
            self._console.print(grid, soft_wrap=False)
        else:
            for name, value in facts:
                self._console.print(Text(f"  {name:<{LABEL_WIDTH}}{value}"))
        self._console.print()

    def start(self, done: int = 0) -> None:
        """Shows the progress bar on a terminal, beginning at `done` steps."""
        if not self._console.is_terminal:
            return
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._progress.start()
        self._task = self._progress.add_task("training", total=self._num_steps, completed=done)

    def stop(self) -> None:
        """Removes the progress bar."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def print_row(self, row: AnyRow) -> None:
        """Prints a held-out loss, or the end of a prompt and the answer on one line each."""
        if isinstance(row, StepRow):
            self.print_step(row)
        elif isinstance(row, EvalRow):
            loss = f"held-out loss {row.eval_loss:.4f}"
            self._console.print(self._head(row.step).append(loss, style="yellow"))
        elif isinstance(row, SampleRow):
            for label, text in (("asked", row.prompt), ("answers", row.text)):
                line = " ".join(printable(text).split())
                end = line if len(line) <= SAMPLE_WIDTH else f"... {line[-SAMPLE_WIDTH:]}"
                self._console.print(self._head(row.step).append(f"{label:<8}{end}", style="green"))

    def print_step(self, row: StepRow) -> None:
        """Updates the bar; every `log_every` steps prints a line of means since the last line."""
        if self._progress is not None:
            loss = "skipped" if row.loss is None else f"loss {row.loss:.3f}"
            self._progress.update(self._task, completed=row.step, description=loss)
        self._window.append(row)
        if row.step == 1 or row.step % self._log_every == 0 or row.step == self._num_steps:
            self._console.print(self._step_line())
            self._window = []

    def print_facts(self, facts: Sequence[tuple[str, str, str]]) -> None:
        """Prints labelled lines with a style each."""
        for name, value, style in facts:
            label = f"{name:<{LABEL_WIDTH + 8}}"
            self._console.print(Text.assemble((label, "cyan"), (printable(value), style)))

    def print_text(self, text: str) -> None:
        """Prints text as it is."""
        self._console.print(Text(text))

    def _head(self, step: int) -> Text:
        width = len(str(self._num_steps))
        return Text().append(f"step {step:>{width}}/{self._num_steps}  ", style="dim")

    def _step_line(self) -> Text:
        rows, last = self._window, self._window[-1]
        time_s = sum(row.step_time_s for row in rows)
        tokens = sum(row.tokens_per_s * row.step_time_s for row in rows)
        samples = sum(row.samples_per_s * row.step_time_s for row in rows)
        shares = " ".join(
            f"{name} {sum(getattr(row, field) for row in rows) / time_s:3.0%}"
            for name, field in (("data", "data_s"), ("compute", "compute_s"), ("comm", "comm_s"))
        )
        losses = [row.loss for row in rows if row.loss is not None]
        loss = f"{sum(losses) / len(losses):.4f}" if losses else "not finite"
        norm = "not finite, skipped" if last.grad_norm is None else f"{last.grad_norm:.2f}"
        return (
            self._head(last.step)
            .append(f"loss {loss}", style="bold")
            .append(f"  grad norm {norm}  lr {last.learning_rate:.1e}")
            .append(f"  {tokens / time_s:>6,.0f} tokens/s  {samples / time_s:.3g} samples/s")
            .append("" if last.mfu is None else f"  MFU {last.mfu:.0%}")
            .append(f"  {human_bytes(last.memory_peak_bytes)}")
            .append(f"  {shares}", style="dim")
        )


class RunWatcher(Watcher):
    """On rank 0, shows and writes every row, and keeps the last ones.

    Args:
        console: Console of the run.
        folder: Folder of the run.
        done: Number of steps finished before; rows of later steps are removed, since they repeat.
        config: Configuration of the run, with its trackers.
        utilization: Model FLOPs utilization at one token per second, if known.

    Attributes:
        step: Row of the last update, also from an earlier session.
        evaluation: Row of the last evaluation.
        num_tokens: Input tokens of this session's updates.
        done: Steps before this session.
    """

    def __init__(
        self,
        console: RunConsole,
        folder: RunFolder,
        done: int,
        config: RunConfig,
        utilization: float | None = None,
    ) -> None:
        self.step, self.evaluation = keep_rows(folder.metrics, done)
        self.num_tokens = 0
        self.console, self.done, self._utilization = console, done, utilization
        self._trackers = Trackers(config, folder.path, done)
        self._metrics = MetricsWriter(folder.metrics)

    def __enter__(self) -> Self:
        self.console.start(self.done)
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.console.stop()
        self._metrics.close()
        self._trackers.close(is_good=error is None)

    def tell(self, row: AnyRow) -> None:
        """Write a row, then show it."""
        if isinstance(row, StepRow):
            self.num_tokens += round(row.tokens_per_s * row.step_time_s)
            if self._utilization is not None:
                row = replace(row, mfu=self._utilization * row.tokens_per_s)
            self.step = row
        elif isinstance(row, EvalRow):
            if self.evaluation is not None and self.evaluation.step == row.step:
                return  # repeated only for the count of the patience
            self.evaluation = row
        self._metrics.write(row)
        if not isinstance(row, SampleRow):
            self._trackers.write(row)
        self.console.print_row(row)

    def misses_evaluation(self, step: int) -> bool:
        """Whether the rows end with that step and lack its held-out loss."""
        if self.step is None or self.step.step != step:
            return False
        return self.evaluation is None or self.evaluation.step != step


def weights_line(config: RunConfig) -> str:
    """The origin of the initial weights."""
    folder = weights_folder(config)
    seed = config.training.seed
    return f"weights of {folder}" if folder else f"random weights (seed {seed})"


def run_lines(config: RunConfig, data: DatasetFacts, steps: StepPlan) -> list[tuple[str, str]]:
    """Labelled lines of the banner that both engines share: data, batch, steps."""
    shape, training, limit = steps.order.shape, config.training, host_memory.limit()
    sizes = {axis: getattr(config.sharding, axis) for axis in ("context", "tensor")}
    shared, dropped = [f"{axis} {size}" for axis, size in sizes.items() if size > 1], ""
    whose = f"groups of ranks ({' x '.join(shared)})" if shared else "rank(s)"
    empty = f" - {shape.places - shape.global_batch} empty" if shape.samples else ""
    if steps.order.num_dropped:
        dropped = f"; {steps.order.num_dropped} sequences per epoch do not fill a step: dropped"
    return [
        (
            "data",
            f"{data.origin}: {data.num_train_tokens:,} tokens to train on "
            f"({data.num_train_sequences:,} sequences of {data.sequence_length}), "
            f"{data.num_held_out_tokens:,} held out, {data.num_dropped_tokens:,} dropped at the "
            f"ends, vocabulary of {data.vocab_size:,}{''.join(f'; {note}' for note in data.notes)}",
        ),
        (
            "batch",
            f"{shape.per_device} per rank x {shape.accumulation} micro-batch(es) x "
            f"{shape.world_size} {whose}{empty} = {shape.global_batch} sequences, "
            f"{shape.global_batch * data.sequence_length:,} tokens per step",
        ),
        (
            "steps",
            f"{steps.num_steps} ({steps.num_epochs:.2f} epochs), {training.optim}, learning rate "
            f"{training.learning_rate:g} {training.lr_scheduler_type} after "
            f"{steps.num_warmup_steps} steps of warm-up{dropped}",
        ),
        *([("limit", str(limit))] if limit.file is not None else []),
    ]


def plan_lines(config: RunConfig, plan: Plan, device: str) -> list[tuple[str, str]]:
    """Labelled lines of the banner for the torch engine: model, mesh, plan, state, dtypes.

    Args:
        config: Configuration of the run.
        plan: Plan of the run.
        device: Type of the ranks' device, cpu or cuda.
    """
    mesh, groups = plan.mesh, [group for unit in plan.units for group in unit.groups]
    num_frozen = sum(len(group.layout.placements) for group in groups if not group.trainable)
    frozen = f" ({num_frozen} tensors frozen)" if num_frozen else ""
    slot_bytes = sum(ring.num_bytes for ring in plan.rings)
    rows = ", ".join(
        f"{row['name']} {human_bytes(int(row['bytes']))}" for row in plan.rows() if row["bytes"]
    )
    model = f"{plan.model_kind}, {plan.num_parameters:,} parameters{frozen}"
    axes = f"{axes_of(plan)}, {plan.strategy}"
    places = [f"{human_bytes(size)} {place}" for place, size in plan.peak_bytes.items() if size]
    return [
        ("model", f"{model}, {weights_line(config)}"),
        ("mesh", f"{mesh.world_size} rank(s) on {device}: {axes}, transport {plan.transport}"),
        (
            "plan",
            f"{len(plan.units)} units, padding {padding(plan):.2%}, "
            f"{sum(ring.count for ring in plan.rings)} slots of {human_bytes(slot_bytes)} in all, "
            f"prefetch {plan.depths.forward} forward and {plan.depths.backward} backward",
        ),
        ("state", f"{' + '.join(places)} per rank: {rows}"),
        ("dtypes", contracts(plan)),
    ]


# ---- the result ----------------------------------------------------------------------------------


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
        "library_bytes": sum(r.num_bytes for r in outlook.rows if r.name == WORKSPACES)
        if outlook
        else 0,
        "expected_step_time_s": outlook.step_time_s if outlook else None,
        "expected_tokens_per_s": outlook.tokens_per_s if outlook else None,
        "expected_wait_s": outlook.times.exposed if outlook and outlook.times else None,
        "whole_logits": view.whole_logits if isinstance(view, View) else None,
        "measures_process": not torch.cuda.is_available(),  # see `_memory`
        "rows": plan.rows(),
    }
    if steps is None:
        return found
    if steps.save_every is not None:  # a checkpoint is written from a copy during training
        found["rows"] += [{"name": "checkpoint staging (host)", "bytes": plan.staging_bytes}]
    shape = steps.order.shape
    return {**found, "num_steps": steps.num_steps, "samples_per_step": shape.global_batch}


def mark_running(session: Session) -> None:
    """Record that the run is running, and the memory of its process besides the model's tensors.

    That is often more than the current memory, because libraries allocate in the first step too.
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
    """On rank 0, after model/ was written, write and show the results of a run.

    Args:
        session: The run.
        watcher: Object with the last rows and the console.
        sample: Text sampled from the trained model.
        wall_s: Seconds since the ranks began.
        average_loss: Held-out loss of the averaged weights (ema_decay), if any.
    """
    folder, baseline = session.folder, session.dataset.facts.baseline
    memory = memory_bytes(session.seat.device)
    # A run that was killed after its last step may have lost its rows.
    last = watcher.step or StepRow(watcher.done, 0, None, None, 0, 0, 0, 0, 0, 0, 0, *memory)
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
    try:
        write_report(folder.path)
    except ConfigError as error:  # the run is complete without a page
        watcher.console.print_text(f"no page of the run: {error}")
    _print_result(watcher.console, folder, measured, sample)


def _print_result(
    console: RunConsole, folder: RunFolder, measured: dict[str, Any], sample: Sample
) -> None:
    """Shows the held-out loss next to the baseline, the sample, and where the files are."""
    console.print_text("")
    if measured["stopped_early"]:
        why = "the held-out loss no longer improves (training.early_stopping_patience)"
        console.print_facts([("ended", f"after step {measured['num_steps']}: {why}", "")])
    loss, nats = measured["eval_loss"], measured["baseline_loss"]
    if loss is not None and nats is not None:
        verdict = f"beaten by {nats - loss:.3f}" if loss < nats else "not beaten"
        baseline = (
            f"{nats:.4f} nats per token (interpolated, lambda {measured['baseline_weight']:.2f}, "
            f"the same {measured['num_held_out_tokens']:,} tokens): {verdict}"
        )
        held_out = ("held-out loss", f"{loss:.4f} nats per token", "bold")
        color = "green" if loss < nats else "red"
        console.print_facts([held_out, ("bigram baseline", baseline, color)])
    if measured["ema_eval_loss"] is not None:
        text = f"{measured['ema_eval_loss']:.4f} nats per token (in {folder.model_ema})"
        console.print_facts([("average's loss", text, "")])
    console.print_text(f"\n{sample.text}\n")
    rate = measured["tokens_per_s"]
    speed = f"{rate:,.0f} tokens/s" if rate else "all steps were already done"
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
    measured = f"measured {human_bytes(peak_bytes)} per rank"
    if before:
        measured += " (without pages of files, which the kernel drops when memory is short)"
    if expected is None:  # the compiler lays out everything but the state
        return measured
    libraries = planned.get("library_bytes", 0)
    told = f"planned {human_bytes(expected - libraries)} of tensors"
    if libraries:
        told += f" + {human_bytes(libraries)} of libraries (an estimate from large runs)"
    if before:
        told += f" + {human_bytes(before)} of the process = {human_bytes(expected + before)}"
    return f"{told}; {measured}"
