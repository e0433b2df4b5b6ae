"""The constants of the forecast: what physics leaves open, within bounds that physics gives.

`benchmarks/forecast_fit.py` fits them to published runs and writes the values into this file. What
devices can do (devices.py) are data sheets and independent measurements, and are not fitted.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, slots=True)
class Bound:
    """Where a constant may lie, and why."""

    low: float
    high: float
    source: str


def _constant(value: float, low: float, high: float, source: str) -> Any:
    return field(default=value, metadata={"bound": Bound(low, high, source)})


@dataclass(frozen=True, slots=True)
class Constants:
    """Constants of speed, then of memory."""

    matmul_share: float = _constant(0.8893, 0.6, 1.0, "of the measured best matmul, in a model")
    hopper_matmul: float = _constant(0.8229, 0.6, 1.0, "of that on H100, whose clock power limits")
    tpu_matmul_share: float = _constant(0.9235, 0.5, 1.0, "the same of XLA's matmuls on TPUs")
    narrow_width: float = _constant(270.6, 0.0, 1000.0, "width at which matmuls reach half")
    elementwise_passes: float = _constant(2.044, 0.3, 5.0, "reads and writes of activations")
    compiled_passes: float = _constant(0.352, 0.1, 1.0, "share of them left after fusion")
    xla_passes: float = _constant(
        0.7334, 0.1, 1.0, "the same after XLA's, which fuses whole blocks"
    )
    logits_bytes: float = _constant(34.86, 6.0, 60.0, "traffic a logit, loss and gradient")
    attention_share: float = _constant(
        0.4083, 0.2, 1.0, "flash attention's share of a matmul's rate"
    )
    hopper_attention: float = _constant(0.6089, 0.3, 1.2, "of that on H100, kernels of version 2")
    tuned_attention: float = _constant(2.113, 1.0, 2.5, "of that with cuDNN or Transformer Engine")
    link_share: float = _constant(
        0.4696, 0.2, 1.0, "of the links in a host, as collectives reach it"
    )
    fabric_share: float = _constant(1.0, 0.1, 1.0, "of the fabric, as collectives reach it")
    overlap: float = _constant(2.61, 1.0, 8.0, "norm that joins work and traffic: 1 is no overlap")
    hop_s: float = _constant(3e-05, 3e-7, 3e-5, "latency of a ring's hop")
    launch_s: float = _constant(0.0004921, 3e-5, 3e-3, "host time to issue a block's forward")
    fp8_speedup: float = _constant(1.92, 1.0, 2.0, "of matmuls, casts included")
    activation_scale: float = _constant(1.015, 0.5, 2.0, "of what a block keeps, tensor by tensor")
    compiled_kept: float = _constant(0.7688, 0.4, 1.0, "share of it that a compiler keeps")
    selective_kept: float = _constant(0.3908, 0.2, 0.8, "share that is kept by operation")
    logits_held: float = _constant(8.77, 4.0, 20.0, "bytes a logit: itself, in float32, gradient")
    gathered_blocks: float = _constant(1.395, 1.0, 3.0, "that are whole at once")
    cached_share: float = _constant(0.9661, 0.0, 2.0, "of what comes and goes, cached beside it")
    base_gib: float = _constant(1.46, 0.0, 2.0, "of libraries' workspaces")

    @classmethod
    def bounds(cls) -> dict[str, Bound]:
        """By name."""
        return {one.name: one.metadata["bound"] for one in fields(cls)}


FITTED = Constants()


class Familiarity(StrEnum):
    """How close a run is to those that the constants were fitted to."""

    USUAL = "usual"  # the devices, formats and meshes that most published runs have
    UNUSUAL = "unusual"
    ASSUMED = "assumed"  # a number that matters was missing


# Half widths of 80 % intervals, of logarithms: quantiles of the errors on groups left out.
SPREAD = {
    "speed": {
        Familiarity.USUAL: 0.142,
        Familiarity.UNUSUAL: 0.302,
        Familiarity.ASSUMED: 0.460,
    },
    "memory": {
        Familiarity.USUAL: 0.254,
        Familiarity.UNUSUAL: 0.363,
        Familiarity.ASSUMED: 0.608,
    },
}
