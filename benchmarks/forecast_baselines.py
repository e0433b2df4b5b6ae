"""Baselines of the forecast: simple rules and boosted trees, scored on the same rows.

A baseline is never fitted to rows of the group that it predicts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from math import log

import numpy as np

from benchmarks.forecast_fit import FOLDS, Sample, folds
from fullshard.outlook.memory import GIB

Rule = Callable[[Sequence[Sample]], np.ndarray]


def operations(one: Sample) -> float:
    """Returns operations per token with recompute: 6 N + 12 L d s, plus a third."""
    model, run = one.run.model, one.run
    plain = 6 * model.active_params + 12 * model.layers * model.width * run.batch.seq_len
    return plain * (1 + run.kernels.recompute / 3)


def constant_utilisation(found: Sequence[Sample]) -> np.ndarray:
    """Errors with one share of the peak per device: the median of the other groups."""
    shares = [one.measured * operations(one) / one.run.device.peak for one in found]
    out = []
    for place, one in enumerate(found):
        others = [
            share
            for other, share in zip(found, shares, strict=True)
            if other.group != one.group and other.run.device.name == one.run.device.name
        ] or [share for other, share in zip(found, shares, strict=True) if other.group != one.group]
        out.append(log(float(np.median(others)) / shares[place]))
    return np.array(out)


def nearest(found: Sequence[Sample], scale: Callable[[Sample], float]) -> np.ndarray:
    """Errors with the scaled measurement of the most similar row of another group."""

    def place_of(one: Sample) -> np.ndarray:
        run = one.run
        numbers = (
            run.model.num_params,
            run.batch.seq_len,
            run.tokens_per_micro_batch,
            run.mesh.world_size,
        )
        flags = (run.kernels.recompute, run.sharding.value, run.device.peak / 1e14)
        return np.array([*map(log, numbers), *flags])

    places = np.array([place_of(one) for one in found])
    out = []
    for one, place in zip(found, places, strict=True):
        away = [i for i, other in enumerate(found) if other.group != one.group]
        best = found[min(away, key=lambda i: float(np.abs(places[i] - place).sum()))]
        out.append(log(best.measured * scale(one) / scale(best) / one.measured))
    return np.array(out)


def states_alone(found: Sequence[Sample]) -> np.ndarray:
    """16 bytes per parameter, divided by the ranks, as common estimators do."""
    return np.array(
        [
            log(16 * one.run.model.num_params / one.run.mesh.shard / GIB / one.measured)
            for one in found
        ]
    )


# ---- boosted trees -------------------------------------------------------------------------------


def has_trees() -> bool:
    """Whether scikit-learn is installed, which only this script needs."""
    return find_spec("sklearn") is not None


def features(one: Sample) -> tuple[list[float], list[str]]:
    """Returns logarithms of a row's numbers, and its categories, without measurements."""
    run = one.run
    model, mesh, batch, kernels = run.model, run.mesh, run.batch, run.kernels
    numbers = (
        model.num_params, model.layers, model.width, model.mlp_width, model.kv_width, model.vocab,
        mesh.world_size, mesh.shard, mesh.replicate, mesh.tensor, mesh.context, mesh.pipeline,
        batch.seq_len, batch.micro_batch, batch.accumulation, run.tokens_per_micro_batch,
        run.device.peak, run.device.bandwidth, run.device.memory_gib, run.device.link, run.fabric,
        model.num_params / mesh.shard, 1 + kernels.recompute, 1 + kernels.kept,
        run.precision.master, run.precision.gather, 1 + run.state_bytes,
    )  # fmt: skip
    kinds = (run.device.name, run.sharding, run.tuning, run.precision.math, run.metric)
    flags = (kernels.compiler, kernels.is_tuned, run.offloads, run.reshards, model.gated)
    return [log(number) for number in numbers], [str(kind) for kind in (*kinds, *flags)]


def boosted_trees(what: str, found: Sequence[Sample]) -> np.ndarray | None:
    """Errors of scikit-learn's histogram trees; None without it."""
    if not has_trees():
        return None
    from sklearn.ensemble import HistGradientBoostingRegressor  # optional

    numbers, kinds = zip(*map(features, found), strict=True)
    columns = sorted({(place, kind) for row in kinds for place, kind in enumerate(row)})
    one_hot = [[float(row[place] == kind) for place, kind in columns] for row in kinds]
    table = np.hstack([np.array(numbers), np.array(one_hot)])
    scale = [one.run.device.peak / operations(one) if what == "speed" else 1.0 for one in found]
    target = np.log([one.measured for one in found]) - np.log(scale)
    out, fold_of = np.zeros(len(found)), folds(found)
    for fold in range(FOLDS):
        away = fold_of == fold
        trees = HistGradientBoostingRegressor(
            loss="absolute_error", learning_rate=0.1, max_iter=100, min_samples_leaf=5,
            random_state=0,
        )  # fmt: skip
        trees.fit(table[~away], target[~away])
        out[away] = trees.predict(table[away]) - target[away]
    return out


RULES: dict[str, dict[str, Rule]] = {
    "speed": {
        "one utilisation a device": constant_utilisation,
        "nearest row scaled by operations": lambda found: nearest(
            found, lambda one: one.run.device.peak / operations(one)
        ),
    },
    "memory": {
        "16 bytes a parameter": states_alone,
        "nearest row": lambda found: nearest(found, lambda _: 1.0),
    },
}
