"""Compare the results of the ranks with those of one process.

Every rank writes its own pieces, and each piece is compared with the same elements of the
reference. A wrong element on any rank is found, and so is an element that no rank has.

[Note: likely causes]
The likely cause of a pattern of differences is derived from the results alone. Only the first step
with a difference is examined, because all later steps are wrong as well:

    a NaN                                                   missed gather (released slots are NaN)
    two weights where the reference has one                 lost tie
    a rank's loss is another rank's                         repeated data
    a finite loss is wrong, weights were right before it    stale slot
    gradients are one rank's own                            skipped reduction
    gradients are the reference's times one factor          wrong divisor

[Note: the folder of a check]
It is JSON and safetensors:

    job.json              numbers, passes, sharding            both sides
    config.json           the shrunk model's configuration     both
    weights.safetensors   every weight, perturbed              both
    batches.safetensors   STEP.BATCH.MICRO.input_ids, .labels  both
    PASS/reference.*      results of one process                 by reference.py
    PASS/rank_K.*         what rank K computed, or all devices   by rank.py or xla.py
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file
from torch import nn

from fullshard.config.schema import ShardConfig
from fullshard.recipes.base import IGNORED, Seat
from fullshard.verify.faults import Fault

NUM_STEPS = 3  # one more follows after saving and loading
NUM_SEQUENCES = 2
NUM_TOKENS = 12
JOB_FILE = "job.json"
# Tolerances: in float64; in float64 if the model still returns float32 logits (two ways to write a
# loss then differ by 1e-7); below float32.
EXACT, SINGLE, LOW = 1e-9, 1e-4, 0.2
ROUTED = 0.5  # below float32, where a token may go to other experts

# The epsilon is large. An update is a gradient over the root of its square, so with the usual 1e-8
# the rounding noise of gradients that should be zero (a bias before a norm) would move weights.
OPTIMIZER = {
    "learning_rate": 1e-2,
    "beta1": 0.9,
    "beta2": 0.95,
    "epsilon": 1e-4,
    "weight_decay": 0.1,
}
# Largest norms of the trained steps, and of the step after loading, which is not clipped.
MAX_GRAD_NORMS = 0.5, 500.0


@dataclasses.dataclass(frozen=True)
class Pass:
    """One comparison in one choice of dtypes.

    Attributes:
        name: "float64", or the user's compute dtype.
        tolerance: Largest relative difference that counts as equal.
        sharding: Fields of ShardConfig.
        loss_scale: Loss scale of the reference, against underflow of float16 gradients.
        wide: The reference computes in float64 throughout. transformers computes norms and rotary
            positions in float32, also in float64 models.
        rounds_alike: Both sides round at the same places below float32. Then updates are compared,
            and ranks compute the loss from all logits, as the reference does: chunks would round at
            other places, which each step amplifies.
    """

    name: str
    tolerance: float
    sharding: dict[str, Any]
    master_dtype: str = "float64"
    compute_dtype: str = "float64"
    reduce_dtype: str = "float64"
    loss_scale: float = 1.0
    wide: bool = False
    rounds_alike: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether single elements are compared. Below float32 one value that rounds the other way
        makes a large error, so the root mean square is compared.
        """
        return self.compute_dtype == "float64" or self.tolerance < LOW


@dataclasses.dataclass(frozen=True)
class CheckJob:
    """The job of every process of a check; the module's docstring lists the files of its folder."""

    passes: tuple[Pass, ...]
    world_size: int
    num_micro_batches: int
    frozen: tuple[str, ...]
    model_arguments: dict[str, Any]
    device: str = "cpu"
    fault: str | None = None
    num_steps: int = NUM_STEPS
    max_grad_norms: tuple[float, float] = MAX_GRAD_NORMS
    optimizer: dict[str, float] = dataclasses.field(default_factory=lambda: dict(OPTIMIZER))
    loss_chunk_size: int | None = None  # None: the loss of all tokens at once

    def seat(self, rank: int, device: str = "cpu") -> Seat:
        """A rank's place on the axes, which are those of every pass."""
        sharding = ShardConfig.of(self.passes[0].sharding)
        return Seat(rank, self.world_size, torch.device(device), sharding)

    @property
    def num_batches(self) -> int:
        """Batches of a micro-batch over all ranks."""
        return self.seat(0).num_batches

    @property
    def written_steps(self) -> tuple[int, ...]:
        """Steps whose gradients and parameters are written; losses and norms always are."""
        last = self.num_steps
        return tuple(step for step in range(last + 1) if step < NUM_STEPS or step >= last - 1)

    def max_norm(self, step: int) -> float:
        """The norm to which the gradients of a step are clipped."""
        return self.max_grad_norms[step == self.num_steps]

    def write(self, folder: Path) -> None:
        """Writes job.json."""
        more = {"written_steps": self.written_steps, "num_batches": self.num_batches}
        fields = {**dataclasses.asdict(self), **more}
        (folder / JOB_FILE).write_text(json.dumps(fields))

    @staticmethod
    def read(folder: Path) -> CheckJob:
        """Reads job.json."""
        return TypeAdapter(CheckJob).validate_json((folder / JOB_FILE).read_bytes())


def write_batches(folder: Path, job: CheckJob, vocab_size: int) -> None:
    """Random tokens for every step, rank and micro-batch.

    Batches have different numbers of label tokens, so that a mean of means differs from the mean
    over all tokens.
    """
    generator = torch.Generator().manual_seed(17)
    batches: dict[str, torch.Tensor] = {}
    shape = (NUM_SEQUENCES, NUM_TOKENS)
    for step in range(job.num_steps + 1):
        for rank in range(job.num_batches):
            for micro in range(job.num_micro_batches):
                ids = torch.randint(0, vocab_size, shape, generator=generator)
                labels = ids.clone()
                labels[0, : 2 + (3 * rank + 2 * micro + step) % 7] = IGNORED
                batches[f"{step}.{rank}.{micro}.input_ids"] = ids
                batches[f"{step}.{rank}.{micro}.labels"] = labels
    save_file(batches, folder / "batches.safetensors")


def write_weights(folder: Path, model: nn.Module) -> None:
    """Writes the model's state with noise on every weight, because ones and zeros hide faults."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            width = param.shape[-1] if param.ndim > 1 else 1
            noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            param.add_((min(0.1, width**-0.5) * noise).to(param))
    state = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    save_file({name: value.contiguous() for name, value in state.items()}, folder / WEIGHTS)


WEIGHTS = "weights.safetensors"


LOSS, NORM, GRADIENT, PARAMETER = "loss", "gradient norm", "gradients", "updated parameters"
STATE, RELOADED = "saved state", "step after loading"
KINDS = (LOSS, NORM, GRADIENT, PARAMETER, STATE, RELOADED)
MEAN = "mean over the ranks"
FIRST = -1  # step of the weights before the first step

# Gradients far below the largest one are rounding noise of terms that cancel. They are compared
# relative to this share of the largest one.
EXACT_FLOOR, LOW_FLOOR = 1e-3, 0.1


@dataclasses.dataclass(frozen=True)
class Difference:
    """The error of one number or tensor.

    Attributes:
        kind: One of KINDS except RELOADED, which covers everything in the step after loading.
        step: Step from 0; the step after loading has the number of steps.
        rank: Rank of the piece; None if it belongs to all ranks.
        name: Name of the parameter; empty for a number.
        error: Relative error; infinite for NaN and for a missing value.
    """

    kind: str
    step: int
    rank: int | None
    name: str
    error: float

    def where(self) -> str:
        """In words."""
        rank = "" if self.rank is None else f", rank {self.rank}"
        return f"{self.name + ', ' if self.name else ''}step {self.step + 1}{rank}"


@dataclasses.dataclass(frozen=True)
class WorstRow:
    """The worst error of one kind.

    Attributes:
        where: Parameter, step and rank of the worst error; empty if nothing was compared.
    """

    name: str
    dtype: str
    worst_error: float
    tolerance: float
    where: str

    @property
    def is_equal(self) -> bool:
        return self.worst_error <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        """For --json, which has no infinity: an infinite error is null."""
        error = self.worst_error if math.isfinite(self.worst_error) else None
        return {**dataclasses.asdict(self), "worst_error": error, "equal": self.is_equal}


class Sides:
    """Results of both sides for one pass.

    Attributes:
        numbers: Losses, norms and ties of the reference.
        whole: Tensors of the reference; those of step FIRST are the weights of both sides.
        facts: Numbers of every rank.
        pieces: Tensors of every rank.
    """

    def __init__(self, folder: Path, job: CheckJob, choice: Pass) -> None:
        self.job, self.choice = job, choice
        place = folder / choice.name
        self.numbers = json.loads((place / "reference.json").read_text())
        self.whole = load_file(place / "reference.safetensors")
        first = load_file(folder / WEIGHTS).items()
        self.whole |= {f"{FIRST}/parameter/{name}": value for name, value in first}
        ranks = range(job.world_size)
        self.facts = [json.loads((place / f"rank_{rank}.json").read_text()) for rank in ranks]
        self.pieces = [load_file(place / f"rank_{rank}.safetensors") for rank in ranks]
        state = place / "state.safetensors"
        self.state = load_file(state) if state.is_file() else None
        self.size = _largest if choice.is_exact else _root_mean_square
        self.seats = [job.seat(rank) for rank in ranks]

    def losses(self, step: int, rank: int) -> list[float]:
        """Summed losses of a rank's batches, over the ranks that have the other parts of them."""
        part, stride = self.seats[rank].parts[0], self.seats[rank].num_inner
        first = rank - part * stride
        ranks = range(first, first + self.seats[rank].parts[1] * stride, stride)
        of_parts = (_at(self.facts[one]["losses"], step, []) for one in ranks)
        return [sum(micro) for micro in zip(*of_parts, strict=False)]

    @property
    def names(self) -> list[str]:
        """Parameters of the reference."""
        prefix = "0/parameter/"
        return [key.removeprefix(prefix) for key in self.whole if key.startswith(prefix)]

    def piece(self, step: int, kind: str, rank: int, name: str) -> torch.Tensor | None:
        """A rank's elements of a tensor; gradients are those before clipping."""
        if step == FIRST:
            return self.part(step, kind, rank, name)
        found = self.pieces[rank].get(f"{step}/{kind}/{name}")
        if found is None or kind == "parameter":
            return found
        norm = self.facts[rank]["norm"][step]
        return found.double() / min(1.0, self.job.max_norm(step) / (norm + 1e-6))

    def at(self, step: int, rank: int, name: str) -> torch.Tensor | None:
        """Positions of a rank's elements in the flat parameter, in the order of its pieces."""
        model = int(step == self.job.num_steps)  # the loaded one
        return self.pieces[rank].get(f"{model}/at/{name}")

    def part(self, step: int, what: str, rank: int, name: str) -> torch.Tensor | None:
        """The reference's values for the elements that a rank has."""
        whole = self.whole.get(f"{step}/{what}/{name}")
        at = self.at(step, rank, name)
        return None if whole is None or at is None else whole.reshape(-1)[at]

    def joined(self, step: int, kind: str, name: str) -> torch.Tensor | None:
        """A full parameter or gradient, flat, joined from the ranks' pieces."""
        whole = torch.zeros(self.whole[f"0/parameter/{self._first(name)}"].numel()).double()
        for rank in range(self.job.world_size):
            piece, at = self.piece(step, kind, rank, name), self.at(step, rank, name)
            if piece is None or at is None:
                return None
            whole[at] = piece.double()
        return whole

    def _first(self, name: str) -> str:
        """The reference's name of a parameter, which may be tied there."""
        return next((tied[0] for tied in self.numbers["ties"] if name in tied), name)

    # ---- comparing

    def differences(self) -> Iterator[Difference]:
        """The error of every number and tensor, in the order of a step."""
        for step in range(self.job.num_steps + 1):
            if step == self.job.num_steps:
                yield from self._state_errors()
            is_written = step in self.job.written_steps
            yield from self._loss_errors(step)
            yield from self._tensor_errors(step, "gradient", GRADIENT) if is_written else ()
            yield from self._norm_errors(step)
            yield from self._tensor_errors(step, "parameter", PARAMETER) if is_written else ()

    def _loss_errors(self, step: int) -> Iterator[Difference]:
        for rank, facts in enumerate(self.facts):
            if "losses" in facts:  # losses per rank; XLA's step returns only the mean
                wanted = self.numbers["losses"][step][self.seats[rank].batch]
                found = self.losses(step, rank)
                errors = (number_error(_at(found, i, math.nan), it) for i, it in enumerate(wanted))
                yield Difference(LOSS, step, rank, "", max(errors, default=0.0))
            mean = number_error(_at(facts["loss"], step, math.nan), self.numbers["loss"][step])
            yield Difference(LOSS, step, None, MEAN, mean)

    def _norm_errors(self, step: int) -> Iterator[Difference]:
        for rank, facts in enumerate(self.facts):
            error = number_error(_at(facts["norm"], step, math.nan), self.numbers["norm"][step])
            yield Difference(NORM, step, rank, "", error)

    def _tensor_errors(self, step: int, what: str, kind: str) -> Iterator[Difference]:
        floor = self._floor(step) if what == "gradient" else 1e-3
        by_update = what == "parameter" and self.choice.rounds_alike
        for name in self.names:
            key = f"{step}/{what}/{name}"
            covered = torch.zeros(self.whole[f"0/parameter/{name}"].numel(), dtype=torch.bool)
            for rank in range(self.job.world_size):
                at = self.at(step, rank, name)
                if at is None:
                    yield Difference(kind, step, rank, name, math.inf)
                    continue
                found = self.piece(step, what, rank, name)
                wanted = self.part(step, what, rank, name)
                error = self._error(found, wanted, self._scale(key, floor))
                if by_update:
                    error = self._update_error(step, rank, name)
                yield Difference(kind, step, rank, name, error)
                covered[at] = True
            if not covered.all():
                yield Difference(kind, step, None, name, math.inf)

    def _update_error(self, step: int, rank: int, name: str) -> float:
        """The error of a parameter's change since the last written step, relative to the change.

        Below float32 an error may be as large as the whole update and small for the weight. Noise
        moves a weight whose gradient should be zero, by less than the learning rate.
        """
        before = max(one for one in (FIRST, *self.job.written_steps) if one < step)

        def change(of: Callable[..., torch.Tensor | None]) -> torch.Tensor | None:
            now, then = (of(one, "parameter", rank, name) for one in (step, before))
            if now is None or then is None or now.shape != then.shape:
                return None
            return now.double() - then.double()

        now, then = (self.whole[f"{one}/parameter/{name}"].double() for one in (step, before))
        floor = self.job.optimizer["learning_rate"]
        return self._error(change(self.piece), change(self.part), max(self.size(now - then), floor))

    def _state_errors(self) -> Iterator[Difference]:
        step, state = self.job.num_steps - 1, self.state or {}
        wanted = {key.removeprefix("state/"): k for k in self.whole if (key := k)[:6] == "state/"}
        for name in sorted(set(wanted) | set(state)):
            whole = self.whole.get(wanted.get(name, ""))
            found = state.get(name)
            scale = 1.0 if whole is None else self._scale(wanted[name], 1e-3)
            yield Difference(STATE, step, None, name, self._error(found, whole, scale))

    def _error(
        self, found: torch.Tensor | None, wanted: torch.Tensor | None, scale: float
    ) -> float:
        if found is None or wanted is None:
            return 0.0 if found is wanted else math.inf
        if found.shape != wanted.shape:
            return math.inf
        return _finite(self.size(found.double() - wanted.double()) / scale)

    def _scale(self, key: str, floor: float) -> float:
        whole = self.whole.get(key)
        return 1.0 if whole is None else max(self.size(whole), floor)

    def _floor(self, step: int) -> float:
        share = EXACT_FLOOR if self.choice.is_exact else LOW_FLOOR
        prefix = f"{step}/gradient/"
        sizes = (self.size(whole) for key, whole in self.whole.items() if key.startswith(prefix))
        return share * max(sizes, default=1.0)


def rows_of(sides: Sides, differences: list[Difference]) -> list[WorstRow]:
    """The worst error of each kind; a kind without any value counts as unequal."""
    rows = []
    last = sides.job.num_steps
    for kind in KINDS:
        worst = max(
            (d for d in differences if (RELOADED if d.step == last else d.kind) == kind),
            key=lambda difference: difference.error,
            default=Difference(kind, 0, None, "nothing", math.inf),
        )
        choice = sides.choice
        rows.append(WorstRow(kind, choice.name, worst.error, choice.tolerance, worst.where()))
    return rows


def _at(values: list[Any], index: int, default: Any) -> Any:
    return values[index] if index < len(values) else default


def number_error(found: float, wanted: float) -> float:
    return _finite(abs(found - wanted) / max(abs(wanted), 1e-3))


def _finite(error: float) -> float:
    return error if error == error else math.inf


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _root_mean_square(values: torch.Tensor) -> float:
    return float(values.double().square().mean().sqrt()) if values.numel() else 0.0


# ---- likely causes -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The likely cause of the differences.

    Attributes:
        kind: Name of a fault, or the kind of result that is wrong first.
        says: One sentence with the evidence.
    """

    kind: str
    says: str


def diagnose(sides: Sides, wrong: Sequence[Difference]) -> Diagnosis | None:
    """The likeliest cause of the differences; None if there are none.

    Args:
        sides: Results of both sides.
        wrong: Differences above the tolerance.
    """
    if not wrong:
        return None
    step = min(difference.step for difference in wrong)
    first = [difference for difference in wrong if difference.step == step]
    for look in (_look_at_ties, _look_for_nan, _look_at_losses, _look_at_gradients):
        found = look(sides, step, first)
        if found is not None:
            return found
    return _plain(first)


def _look_at_ties(sides: Sides, step: int, _: Sequence[Difference]) -> Diagnosis | None:
    """Checks whether names that share a weight in the reference have separate weights here."""
    for tied in sides.numbers["ties"]:
        own = [name for name in tied if sides.at(step, 0, name) is not None]
        if len(own) < 2:
            continue
        found = [sides.joined(step, "gradient", name) for name in own]
        whole = sides.whole.get(f"{step}/gradient/{tied[0]}")
        evidence = "they have separate gradients"
        if whole is not None and all(gradient is not None for gradient in found):
            total = torch.stack([gradient for gradient in found if gradient is not None]).sum(0)
            if _near(total, whole.reshape(-1), sides.choice.tolerance):
                evidence = "the gradients of the two add up to that of the one weight"
        says = f"{' and '.join(own)} are one weight in the reference and several here; {evidence}."
        return Diagnosis(Fault.LOST_TIE, f"A tie is lost: {says}")
    return None


def _look_for_nan(sides: Sides, step: int, _: Sequence[Difference]) -> Diagnosis | None:
    for rank, facts in enumerate(sides.facts):
        seen = facts.get("first_nan")  # of ranks; XLA's step has no modules
        if seen is not None and seen["step"] <= step:
            return Diagnosis(
                Fault.MISSED_GATHER,
                f"A gather was missed: {seen['module']} returned the NaN of released slots on rank "
                f"{rank} in the forward of step {seen['step'] + 1}, where one process computes "
                "finite numbers.",
            )
    return None


def _look_at_losses(sides: Sides, step: int, first: Sequence[Difference]) -> Diagnosis | None:
    """Decide whether a wrong loss comes from other data or from other weights."""
    wrong = sorted({d.rank for d in first if d.kind == LOSS and d.rank is not None})
    if not wrong:
        return None
    wanted, batches = sides.numbers["losses"][step], [seat.batch for seat in sides.seats]
    for rank in wrong:
        found, own = sides.losses(step, rank), batches[rank]
        for other, losses in enumerate(wanted):
            if other != own and _near(found, losses, sides.choice.tolerance):
                return Diagnosis(
                    Fault.REPEATED_DATA,
                    f"Data is repeated: the loss of rank {rank} in step {step + 1} is that of rank "
                    f"{batches.index(other)}'s batch ({sum(found):.6f}), not of its own batch "
                    f"({sum(wanted[own]):.6f}).",
                )
    ranks = "rank " + ", ".join(map(str, wrong))
    if 0 < step < sides.job.num_steps:
        return Diagnosis(
            Fault.STALE_SLOT,
            f"A slot is stale: the stored weights were correct after step {step}, but the forward "
            f"of step {step + 1} computed another, finite loss on {ranks}, so it used old weights.",
        )
    when = "after loading" if step else "of the first step"
    return Diagnosis(
        LOSS,
        f"The forward {when} computed another loss on {ranks}: weights were loaded or gathered "
        "wrongly, or the model depends on more than weights and batch.",
    )


def _look_at_gradients(sides: Sides, step: int, first: Sequence[Difference]) -> Diagnosis | None:
    """Losses are right and gradients wrong: finds a skipped reduction or a wrong divisor."""
    wrong = {d.name for d in first if d.kind == GRADIENT}
    names = sorted(name for name in wrong if f"{step}/gradient/{name}" in sides.whole)
    if not names:
        return None
    units = sorted({sides.facts[0]["units"][name] for name in names})
    at = f"of {', '.join(units[:3])}{' ...' if len(units) > 3 else ''} in step {step + 1}"
    num_batches = sides.job.num_batches
    if all(_is_own(sides, step, name) for name in names):
        return Diagnosis(
            Fault.SKIPPED_REDUCTION,
            f"A reduction was skipped: on every rank the gradients {at} are that rank's own "
            f"instead of the sum over {num_batches} ranks.",
        )
    factors = [_factor(sides, step, name) for name in names]
    known = [factor for factor in factors if factor is not None]
    if len(known) == len(names) and max(known) - min(known) <= 1e-3 * abs(max(known)):
        return Diagnosis(
            Fault.WRONG_DIVISOR,
            f"A divisor is wrong: the gradients {at} are {known[0]:.6g} times those of one "
            f"process, on {num_batches} ranks.",
        )
    return None


def _is_own(sides: Sides, step: int, name: str) -> bool:
    """Whether every rank has its own unreduced gradient, divided by W or not."""
    near = []
    for rank in range(sides.job.world_size):
        found = sides.piece(step, "gradient", rank, name)
        own = sides.part(step, f"own/{sides.seats[rank].batch}", rank, name)
        if found is None or own is None:
            return False
        mean = own / sides.job.num_batches
        near.append(any(_near(found, part, sides.choice.tolerance) for part in (mean, own)))
    return all(near)


def _factor(sides: Sides, step: int, name: str) -> float | None:
    """Factor between our gradient and the reference's; None if they are not proportional."""
    found = sides.joined(step, "gradient", name)
    wanted = sides.whole[f"{step}/gradient/{name}"].reshape(-1).double()
    if found is None or found.shape != wanted.shape:
        return None
    factor = float(found @ wanted) / float(wanted @ wanted)
    return factor if _near(found, factor * wanted, 10 * sides.choice.tolerance) else None


def _plain(first: Sequence[Difference]) -> Diagnosis:
    """Names the kind of result that is wrong first, if no pattern is known."""
    advice = {
        LOSS: "The loss belongs to other data or other weights.",
        GRADIENT: "The gradients differ in a way that matches no known fault.",
        NORM: "The gradients are correct but their norm is not, so clipping would be wrong.",
        PARAMETER: "The gradients are correct but the update is not: check clipping and the "
        "optimizer.",
        STATE: "Training is correct but the state that full_state_dict saves is not.",
    }
    kind = first[0].kind
    return Diagnosis(kind, f"{advice.get(kind, '')} First: {first[0].where()}.".strip())


def _near(
    found: torch.Tensor | list[float], wanted: torch.Tensor | list[float], tolerance: float
) -> bool:
    ours, theirs = (torch.as_tensor(side, dtype=torch.float64) for side in (found, wanted))
    if ours.shape != theirs.shape:
        return False
    scale = max(_largest(theirs), 1e-12)
    return _largest(ours - theirs) <= max(tolerance, 1e-9) * scale
