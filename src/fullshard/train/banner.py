"""The first lines of a run: what will happen, before it does."""

from __future__ import annotations

from dataclasses import dataclass

from fullshard.config.schema import RunConfig
from fullshard.config.values import Command
from fullshard.planner.plan import Plan
from fullshard.planner.text import human_bytes
from fullshard.train.facts import DatasetFacts
from fullshard.train.prepare import StepPlan, weights_folder


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
