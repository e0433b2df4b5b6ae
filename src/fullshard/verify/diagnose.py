"""The likely cause of a pattern of differences, derived from the results alone.

Only the first step with a difference is examined, because all later steps are wrong as well:

    a NaN                                                   missed gather (released slots hold NaN)
    two weights where the reference has one                 lost tie
    a rank's loss is another rank's                         repeated data
    a finite loss is wrong, weights were right before it    stale slot
    gradients are one rank's own                            skipped reduction
    gradients are the reference's times one factor          wrong divisor
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from fullshard.verify.compare import GRADIENT, LOSS, NORM, PARAMETER, STATE, Difference, Sides
from fullshard.verify.faults import Fault


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
        own = [name for name in tied if name in sides.places(step, 0)]
        if len(own) < 2:
            continue
        found = [sides.joined(step, "gradient", name) for name in own]
        whole = sides.whole.get(f"{step}/gradient/{tied[0]}")
        evidence = "each has gradients of its own"
        if whole is not None and all(gradient is not None for gradient in found):
            total = torch.stack([gradient for gradient in found if gradient is not None]).sum(0)
            if _near(total, whole.reshape(-1), sides.choice.tolerance):
                evidence = "the gradients of the two add up to that of the one weight"
        says = f"{' and '.join(own)} are one weight in the reference and several here; {evidence}."
        return Diagnosis(Fault.LOST_TIE, f"A tie is lost: {says}")
    return None


def _look_for_nan(sides: Sides, step: int, _: Sequence[Difference]) -> Diagnosis | None:
    for rank, facts in enumerate(sides.facts):
        seen = facts["first_nan"]
        if seen is not None and seen["step"] <= step:
            return Diagnosis(
                Fault.MISSED_GATHER,
                f"A gather was missed: the NaN that released slots are filled with came out of "
                f"{seen['module']} on rank {rank} in the forward of step {seen['step'] + 1}, "
                "where one process computes finite numbers.",
            )
    return None


def _look_at_losses(sides: Sides, step: int, first: Sequence[Difference]) -> Diagnosis | None:
    """Tells whether a wrong loss comes from other data or from other weights."""
    wrong = sorted({d.rank for d in first if d.kind == LOSS and d.rank is not None})
    if not wrong:
        return None
    wanted = sides.numbers["losses"][step]
    for rank in wrong:
        found = sides.facts[rank]["losses"][step] if step < len(sides.facts[rank]["losses"]) else []
        for other, losses in enumerate(wanted):
            if other != rank and found and _near_list(found, losses, sides.choice.tolerance):
                return Diagnosis(
                    Fault.REPEATED_DATA,
                    f"Data is repeated: the loss of rank {rank} in step {step + 1} is the one that "
                    f"rank {other}'s batch gives ({sum(found):.6f}), not its own batch's "
                    f"({sum(wanted[rank]):.6f}).",
                )
    ranks = "rank " + ", ".join(map(str, wrong))
    if 0 < step < sides.job.num_steps:
        return Diagnosis(
            Fault.STALE_SLOT,
            f"A slot is stale: the weights at rest were right after step {step}, yet the forward "
            f"of step {step + 1} gives another, finite loss on {ranks}: it computed with weights "
            "that are not those of now.",
        )
    when = "after loading" if step else "of the first step"
    return Diagnosis(
        LOSS,
        f"The forward {when} gives another loss on {ranks}: weights were loaded or gathered "
        "wrongly, or the model is not a function of weights and batch alone.",
    )


def _look_at_gradients(sides: Sides, step: int, first: Sequence[Difference]) -> Diagnosis | None:
    """Losses are right and gradients wrong: finds a skipped reduction or a wrong divisor."""
    wrong = {d.name for d in first if d.kind == GRADIENT}
    names = sorted(name for name in wrong if f"{step}/gradient/{name}" in sides.whole)
    if not names:
        return None
    units = sorted({sides.places(step, 0)[n]["unit"] for n in names})
    at = f"of {', '.join(units[:3])}{' ...' if len(units) > 3 else ''} in step {step + 1}"
    world_size = sides.job.world_size
    if all(_is_own(sides, step, name) for name in names):
        return Diagnosis(
            Fault.SKIPPED_REDUCTION,
            f"A reduction was skipped: on every rank the gradients {at} are that rank's own and "
            f"not the sum over {world_size} ranks.",
        )
    factors = [_factor(sides, step, name) for name in names]
    known = [factor for factor in factors if factor is not None]
    if len(known) == len(names) and max(known) - min(known) <= 1e-3 * abs(max(known)):
        return Diagnosis(
            Fault.WRONG_DIVISOR,
            f"A divisor is wrong: the gradients {at} are {known[0]:.6g} times those of one "
            f"process, on {world_size} ranks.",
        )
    return None


def _is_own(sides: Sides, step: int, name: str) -> bool:
    """Whether every rank has its own unreduced gradient, divided by W or not."""
    near = []
    for rank in range(sides.job.world_size):
        found = sides.piece(step, "gradient", rank, name)
        own = sides.part(step, f"own/{rank}", rank, name)
        if found is None or own is None:
            return False
        mean = own / sides.job.world_size
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
        LOSS: "The loss is that of other data or of other weights.",
        GRADIENT: "Gradients differ in no way that a known fault would make them differ.",
        NORM: "Gradients are right and their norm is not: clipping would be wrong.",
        PARAMETER: "Gradients are right and the update is not: clipping or the optimizer.",
        STATE: "The training is right and what full_state_dict saves is not.",
    }
    kind = first[0].kind
    return Diagnosis(kind, f"{advice.get(kind, '')} First: {first[0].where()}.".strip())


def _near(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> bool:
    if found.shape != wanted.shape:
        return False
    if not found.numel():
        return True
    scale = max(float(wanted.abs().max()), 1e-12)
    return float((found.double() - wanted.double()).abs().max()) <= max(tolerance, 1e-9) * scale


def _near_list(found: Sequence[float], wanted: Sequence[float], tolerance: float) -> bool:
    return len(found) == len(wanted) and all(
        math.isclose(a, b, rel_tol=max(tolerance, 1e-9)) for a, b in zip(found, wanted, strict=True)
    )
