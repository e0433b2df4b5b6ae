"""Trains on the ranks of a pool and compares with one process.

Full tensors are assembled from `fs.sharding(p)` and `p.to_local()` with torch's
`all_gather_object`, so that the check is independent of the engine's transports and layouts.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

import fullshard as fs
from fullshard.engine import unit
from fullshard.engine.engine import engine_of
from support.reference import (
    MAX_NORM,
    NUM_STEPS,
    TOLERANCE,
    Step,
    Work,
    difference,
    make_optimizer,
    train_alone,
)

_REFERENCES: dict[Any, list[Step]] = {}  # results of one process, cached for the checks of a rank


def whole(
    model: nn.Module, locals_: dict[str, torch.Tensor | None]
) -> dict[str, torch.Tensor | None]:
    """Assembles the ranks' slices by parameter name. A collective.

    Args:
        model: The sharded model.
        locals_: Elements of each tensor that this rank stores; None for a missing tensor.
    """
    params = dict(model.named_parameters())
    mine: dict[str, tuple[int, int] | None] = {}
    for name, local in locals_.items():
        place = fs.sharding(params[name])
        assert local is None or local.numel() == place.stop - place.start, (name, place)
        mine[name] = None if local is None else (place.start, place.stop)
    flat = [local.detach().reshape(-1) for local in locals_.values() if local is not None]
    dtypes = {piece.dtype for piece in flat}
    assert len(dtypes) <= 1, f"expected one dtype, got {dtypes}"
    own = torch.cat(flat) if flat else torch.empty(0)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, own))
    pieces: dict[str, list[Any]] = {name: [] for name in locals_}
    for ranges, values in everyone:
        lengths = [0 if r is None else r[1] - r[0] for r in ranges.values()]
        for (name, place), values_ in zip(ranges.items(), values.split(lengths), strict=True):
            pieces[name].append(None if place is None else (*place, values_))
    return {name: _join(name, fs.sharding(params[name]).shape, pieces[name]) for name in locals_}


def _join(name: str, shape: tuple[int, ...], pieces: list[Any]) -> torch.Tensor | None:
    if all(piece is None for piece in pieces):
        return None
    assert None not in pieces, f"{name}: there on some ranks only"
    kept: list[torch.Tensor] = []
    end = 0
    for start, stop, values in sorted(pieces, key=lambda piece: piece[:2]):
        if start == stop:
            continue
        if stop == end:
            assert torch.equal(kept[-1], values), f"{name}: replicas differ"
            continue
        assert start == end, f"{name}: elements [{end}, {start}) are on no rank, or on several"
        kept.append(values)
        end = stop
    assert end == torch.Size(shape).numel(), f"{name}: elements from {end} are on no rank"
    return (torch.cat(kept) if kept else torch.empty(0)).view(shape)


def whole_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Returns every full gradient. A collective."""
    grads = {n: p.grad for n, p in model.named_parameters()}
    return whole(model, {n: None if g is None else g.to_local() for n, g in grads.items()})


def whole_params(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns every full parameter. A collective."""
    found = whole(model, {name: p.to_local() for name, p in model.named_parameters()})
    return {name: value for name, value in found.items() if value is not None}


def unlike_gradients(
    model: nn.Module, alone: nn.Module, *, rtol: float = 1e-10, atol: float = 1e-12
) -> list[str]:
    """Returns parameters whose gradients differ from one process, None included. A collective."""
    found, wrong = whole_gradients(model), []
    for name, param in alone.named_parameters():
        ours, theirs = found[name], param.grad
        if ours is None or theirs is None:
            wrong += [] if ours is theirs else [f"{name}: {ours} {theirs}"]
        elif not torch.allclose(ours, theirs, rtol=rtol, atol=atol):
            wrong.append(f"{name}: {ours} {theirs}")
    return wrong


def backward_alone(loss_of: Callable[[int], torch.Tensor]) -> None:
    """Runs backward in one process through the mean of the ranks' losses."""
    size = dist.get_world_size()
    for rank in range(size):
        (loss_of(rank) / size).backward()


def train_sharded(
    build: Callable[[], nn.Module],
    work: Work,
    settings: dict[str, Any],
    *,
    kind: str = "sgd",
    num_steps: int = NUM_STEPS,
) -> tuple[nn.Module, list[Step]]:
    """Trains on this pool; AdamW is made before sharding, and torch clips for it.

    Args:
        build: Makes the model.
        work: Forward and backward of one rank's batch in one step.
        settings: Fields of ShardConfig. Poison is on by default. Two ranks on a CPU gather with
            transport direct; more ranks share a home.
        kind: "sgd" or "adamw".
        num_steps: Updates.
    """
    model = build()
    early = make_optimizer(kind, model.parameters()) if kind == "adamw" else None
    gathers = dist.get_world_size() == 2 and not torch.cuda.is_available()
    transport = {"transport": "direct"} if gathers else {}
    # Weights of test models are small; under adamw they count as large ones, whose gradients are
    # moved one by one.
    large = {"adamw": 0}.get(kind, unit.LARGE_NUMEL)
    with patch.object(unit, "LARGE_NUMEL", large):
        fs.shard(model, **{"poison": True, **transport, **settings})
    optimizer = early or make_optimizer(kind, model.parameters())
    steps = []
    for step in range(num_steps):
        losses = [work(model, step, dist.get_rank())]
        steps.append(finish_step(model, optimizer, losses, torch_clips=early is not None))
    return model, steps


def finish_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    losses: list[torch.Tensor],
    *,
    torch_clips: bool = False,
    gradients_of: Callable[[Any], dict[str, Any]] = whole_gradients,
    params_of: Callable[[Any], dict[str, Any]] = whole_params,
) -> Step:
    """Gathers the gradients, clips, updates and gathers the parameters. A collective."""
    gradients = gradients_of(model)
    if torch_clips:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    else:
        norm = fs.clip_grad_norm_(model, MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return Step(losses, gradients, torch.as_tensor(norm), params_of(model))


def mismatches(found: list[Step], wanted: list[Step], tolerance: float = TOLERANCE) -> list[str]:
    """Describes what differs from one process; empty if nothing does."""
    wrong = []
    rank = dist.get_rank()
    assert len(found) == len(wanted)
    for number, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):

        def compare(what: str, a: Any, b: Any, number: int = number) -> None:
            if a is None or b is None:
                if a is not b:
                    wrong.append(f"step {number}: {what} is None here or there only")
                return
            worst = difference(a, b)
            if not worst <= tolerance:
                wrong.append(f"step {number}: {what} differs by {worst:.3g}")

        compare("loss", ours.losses[0], theirs.losses[rank])
        assert ours.gradients.keys() == theirs.gradients.keys()
        for name in theirs.gradients:
            compare(f"gradient of {name}", ours.gradients[name], theirs.gradients[name])
        compare("norm", ours.norm, theirs.norm)
        for name in theirs.params:
            compare(f"parameter {name}", ours.params[name], theirs.params[name])
    return wrong


def assert_same(found: list[Step], wanted: list[Step], tolerance: float = TOLERANCE) -> None:
    """Compares losses, gradients, norms and parameters with one process."""
    wrong = mismatches(found, wanted, tolerance)
    assert not wrong, "\n".join([f"{len(wrong)} differences, the first:", *wrong[:8]])


def assert_parity(
    build: Callable[[], nn.Module],
    work: Work,
    settings: dict[str, Any],
    *,
    alone: Work | None = None,
    kinds: tuple[str, ...] = ("sgd", "adamw"),
    tolerance: float = TOLERANCE,
) -> nn.Module:
    """Compares three steps of each optimizer with one process; returns the last sharded model.

    Args:
        build: Makes the model.
        work: Runs forward and backward on a rank.
        settings: Fields of ShardConfig.
        alone: Work of one process; None: the same.
        kinds: Optimizers.
        tolerance: Largest relative difference.
    """
    alone = alone or work
    for kind in kinds:
        key = (build, alone, kind, dist.get_world_size())
        if key not in _REFERENCES:
            _REFERENCES[key] = train_alone(
                build, alone, world_size=dist.get_world_size(), kind=kind
            )
        try:
            model, found = train_sharded(build, work, settings, kind=kind)
            assert_same(found, _REFERENCES[key], tolerance)
        except Exception as error:
            case = f"{getattr(build, '__name__', build)}, {getattr(work, '__name__', work)}"
            raise AssertionError(f"{case}, {kind}, {settings}: {error}") from error
    return model


def assert_planned_events(model: nn.Module, step: int) -> None:
    """Checks that the events of this step are those of the plan."""
    engine = engine_of(model)
    done, planned = engine.recorder.events(step), engine.plan.events
    for at, (ours, theirs) in enumerate(zip(done, planned, strict=False)):
        assert ours == theirs, (
            f"step {step}, event {at}: planned {theirs}, done {ours}; before it "
            f"{[(e.kind.value, e.unit) for e in done[max(0, at - 6) : at]]}"
        )
    assert len(done) == len(planned), (step, len(done), len(planned), done[len(planned) :])
