"""The fitted constants of the formulas for time and memory, with their bounds.

`benchmarks/forecast_fit.py` fits them to published runs and writes the values into this file. The
speeds of devices (devices.py) come from data sheets and measurements and are not fitted.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, slots=True)
class Bound:
    """The range of a constant, and its meaning."""

    low: float
    high: float
    source: str


def _constant(value: float, low: float, high: float, source: str) -> Any:
    return field(default=value, metadata={"bound": Bound(low, high, source)})


@dataclass(frozen=True, slots=True)
class Constants:
    """Constants of time, then of memory."""

    matmul_share: float = _constant(0.8902, 0.6, 1.0, "of the measured best matmul, in a model")
    hopper_matmul: float = _constant(0.8064, 0.6, 1.0, "of that on H100, whose clock power limits")
    tpu_matmul_share: float = _constant(0.8595, 0.5, 1.0, "the same of XLA's matmuls on TPUs")
    narrow_width: float = _constant(251.6, 0.0, 1000.0, "width at which matmuls reach half")
    expert_share: float = _constant(
        0.5904, 0.2, 1.0, "the same of a block with experts, whose tokens are sorted and sent"
    )
    elementwise_passes: float = _constant(1.86, 0.3, 5.0, "reads and writes of activations")
    compiled_passes: float = _constant(0.273, 0.1, 1.0, "share of them left after fusion")
    xla_passes: float = _constant(
        0.5517, 0.1, 1.0, "the same after XLA's, which fuses whole blocks"
    )
    logits_bytes: float = _constant(36.06, 6.0, 60.0, "traffic a logit, loss and gradient")
    attention_share: float = _constant(0.39, 0.2, 1.0, "flash attention's share of a matmul's rate")
    hopper_attention: float = _constant(0.6104, 0.3, 1.2, "of that on H100, kernels of version 2")
    tuned_attention: float = _constant(2.5, 1.0, 2.5, "of that with cuDNN or Transformer Engine")
    link_share: float = _constant(
        0.5487, 0.2, 1.0, "of the links in a host, as collectives reach it"
    )
    fabric_share: float = _constant(0.9609, 0.1, 1.0, "of the fabric, as collectives reach it")
    overlap: float = _constant(2.672, 1.0, 8.0, "norm that joins work and traffic: 1 is no overlap")
    wait_s: float = _constant(
        0.0005956, 1e-6, 1e-3, "of a collective for its slowest rank, each time that ranks double"
    )
    launch_s: float = _constant(0.0004918, 3e-5, 3e-3, "host time to issue a block's forward")
    fp8_speedup: float = _constant(1.817, 1.0, 2.0, "of matmuls, casts included")
    logits_held: float = _constant(
        13.37, 10.0, 20.0, "bytes a logit: in 16 bits, float32, log-probability, both gradients"
    )
    fused_logits: float = _constant(
        2.338, 2.0, 12.0, "the same of a compiled loss: in 16 bits, and of a chunk or all the rest"
    )
    gathered_blocks: float = _constant(
        3.0, 1.0, 3.0, "that are whole: this one, the next, the buffer it comes in"
    )
    cached_share: float = _constant(
        0.8308, 0.0, 1.5, "of the smaller moment's memory, beside the larger one's"
    )
    base_gib: float = _constant(1.491, 0.0, 2.0, "of libraries' workspaces and small pieces")

    @classmethod
    def bounds(cls) -> dict[str, Bound]:
        """Returns the bounds by name."""
        return {one.name: one.metadata["bound"] for one in fields(cls)}


FITTED = Constants()


class Familiarity(StrEnum):
    """How similar a run is to those that the constants were fitted to."""

    USUAL = "usual"  # devices, dtypes and meshes of most published runs
    UNUSUAL = "unusual"
    ASSUMED = "assumed"  # an important number was missing


# Half widths of 80 % intervals, of the logarithm: quantiles of errors on held-out groups.
SPREAD = {
    "speed": {
        Familiarity.USUAL: 0.109,
        Familiarity.UNUSUAL: 0.302,
        Familiarity.ASSUMED: 0.403,
    },
    "memory": {
        Familiarity.USUAL: 0.090,
        Familiarity.UNUSUAL: 0.092,
        Familiarity.ASSUMED: 0.526,
    },
}
