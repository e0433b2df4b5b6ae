"""What a run shows: the banner before it starts, step lines, one progress bar, the result.

Rank 0 alone has a console. On a terminal a progress bar with the time left stays below the lines;
elsewhere there are plain lines and nothing that would clutter a log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

from fullshard.config.schema import RunConfig
from fullshard.data.dataset import DatasetFacts
from fullshard.errors import printable
from fullshard.models.build import weights_folder
from fullshard.observe.metrics import EvalRow, StepRow
from fullshard.planner.plan import Plan
from fullshard.planner.text import human_bytes
from fullshard.recipes.registry import Command
from fullshard.run.schedule import StepPlan

LABEL_WIDTH = 10
SAMPLE_WIDTH = 160


class RunConsole:
    """Prints the course of a run; one per run, on rank 0."""

    def __init__(self, num_steps: int, log_every: int, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._num_steps = num_steps
        self._log_every = log_every
        self._window: list[StepRow] = []
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def print_banner(self, title: str, facts: Sequence[tuple[str, str]]) -> None:
        """Prints what will be run: wrapped beside its labels on a terminal, else a line each."""
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
        """Shows the progress bar where there is a terminal, `done` steps on."""
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
        """Takes the progress bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def print_step(self, row: StepRow) -> None:
        """Moves the bar, and prints a line every `log_every` steps: means since the last one."""
        if self._progress is not None:
            loss = "skipped" if row.loss is None else f"loss {row.loss:.3f}"
            self._progress.update(self._task, completed=row.step, description=loss)
        self._window.append(row)
        if row.step == 1 or row.step % self._log_every == 0 or row.step == self._num_steps:
            self._console.print(self._step_line())
            self._window = []

    def print_evaluation(self, row: EvalRow) -> None:
        """Prints a held-out loss."""
        self._console.print(
            self._head(row.step).append(f"held-out loss {row.eval_loss:.4f}", style="yellow")
        )

    def print_sample(self, step: int, prompt: str, answer: str) -> None:
        """Prints the end of a prompt and what the model answers, on one line each."""
        for label, text in (("asked", prompt), ("answers", answer)):
            line = " ".join(printable(text).split())
            shown = line if len(line) <= SAMPLE_WIDTH else f"... {line[-SAMPLE_WIDTH:]}"
            self._console.print(self._head(step).append(f"{label:<8}{shown}", style="green"))

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
        return (
            self._head(last.step)
            .append(f"loss {loss}", style="bold")
            .append(f"  grad norm {_norm(last)}  lr {last.learning_rate:.1e}")
            .append(f"  {tokens / time_s:>6,.0f} tokens/s  {samples / time_s:.3g} samples/s")
            .append("" if last.mfu is None else f"  MFU {last.mfu:.0%}")
            .append(f"  {human_bytes(last.memory_peak_bytes)}")
            .append(f"  {shares}", style="dim")
        )


def _norm(row: StepRow) -> str:
    """Two digits, or what happened in place of a norm."""
    return "not finite, skipped" if row.grad_norm is None else f"{row.grad_norm:.2f}"


@dataclass(frozen=True)
class DataFacts:
    """What every banner speaks of.

    Attributes:
        command: Whose run it is.
        config: Configuration of the run.
        data: Facts about the data set.
        steps: Counts of steps.
    """

    command: Command
    config: RunConfig
    data: DatasetFacts
    steps: StepPlan

    def lines(self) -> list[tuple[str, str]]:
        """Labelled lines: data, batch, steps."""
        return [("data", _data(self.data)), ("batch", _batch(self)), ("steps", _steps(self))]

    def weights(self) -> str:
        """Where the first weights come from."""
        folder = weights_folder(self.config)
        return f"weights of {folder}" if folder else f"random weights (seed {_seed(self)})"


@dataclass(frozen=True)
class RunFacts(DataFacts):
    """The same, and what torch's engine will run.

    Attributes:
        plan: Plan of the run.
        device: On which ranks compute: cpu or cuda.
    """

    plan: Plan
    device: str


def banner(facts: RunFacts) -> list[tuple[str, str]]:
    """Labelled lines: model, data, mesh, plan, dtypes, batch, steps."""
    data, batch, steps = facts.lines()
    return [
        ("model", _model(facts)),
        data,
        ("mesh", _mesh(facts)),
        ("plan", _plan(facts.plan)),
        ("state", _state(facts.plan)),
        ("dtypes", "; ".join(dtype_contracts(facts.plan))),
        batch,
        steps,
    ]


def dtype_contracts(plan: Plan) -> list[str]:
    """Every dtype contract of a plan, in words."""
    contracts = {group.dtypes for unit in plan.units for group in unit.groups}
    return sorted(
        f"master {d.master}, compute {d.compute}, reduce {d.reduce}, accumulate {d.accumulate}"
        for d in contracts
    )


def _model(facts: RunFacts) -> str:
    plan = facts.plan
    groups = [group for unit in plan.units for group in unit.groups if not group.trainable]
    num_frozen = sum(len(group.layout.placements) for group in groups)
    frozen = f" ({num_frozen} tensors frozen)" if num_frozen else ""
    return f"{plan.model_kind}, {plan.num_parameters:,} parameters{frozen}, {facts.weights()}"


def _seed(facts: DataFacts) -> int:
    return facts.config.training.seed


def _data(data: DatasetFacts) -> str:
    return (
        f"{data.origin}: {data.num_train_tokens:,} tokens to train on "
        f"({data.num_train_sequences:,} sequences of {data.sequence_length}), "
        f"{data.num_held_out_tokens:,} held out, {data.num_dropped_tokens:,} dropped at the ends, "
        f"vocabulary of {data.vocab_size:,}{''.join(f'; {note}' for note in data.notes)}"
    )


def _mesh(facts: RunFacts) -> str:
    mesh = facts.plan.mesh
    return (
        f"{mesh.world_size} rank(s) on {facts.device}: replicate {mesh.replicate} x "
        f"shard {mesh.shard}, {facts.plan.strategy}, transport {facts.plan.transport}"
    )


def _plan(plan: Plan) -> str:
    elements = sum(unit.numel for unit in plan.units)
    padding = sum(unit.padding for unit in plan.units)
    slots = sum(ring.count for ring in plan.rings)
    slot_bytes = sum(ring.num_bytes for ring in plan.rings)
    return (
        f"{len(plan.units)} units, padding {padding / max(1, elements):.2%}, {slots} slots of "
        f"{human_bytes(slot_bytes)} in all, prefetch {plan.depths.forward} forward and "
        f"{plan.depths.backward} backward"
    )


def _state(plan: Plan) -> str:
    rows = ", ".join(
        f"{row['name']} {human_bytes(int(row['bytes']))}" for row in plan.rows() if row["bytes"]
    )
    return f"{human_bytes(plan.peak_bytes['device'])} a rank: {rows}"


def _batch(facts: DataFacts) -> str:
    shape = facts.steps.order.shape
    return (
        f"{shape.per_device} a rank x {shape.accumulation} micro-batch(es) x {shape.world_size} "
        f"rank(s) = {shape.global_batch} sequences, "
        f"{shape.global_batch * facts.data.sequence_length:,} tokens a step"
    )


def _steps(facts: DataFacts) -> str:
    steps, training = facts.steps, facts.config.training
    dropped = ""
    if steps.order.num_dropped:
        dropped = f"; {steps.order.num_dropped} sequences an epoch fill no whole step: dropped"
    return (
        f"{steps.num_steps} ({steps.num_epochs:.2f} epochs), {training.optim}, learning rate "
        f"{training.learning_rate:g} {training.lr_scheduler_type} after "
        f"{steps.num_warmup_steps} steps of warm-up{dropped}"
    )
