"""The fitted constants of the formulas for time and memory.

`benchmarks/forecast_fit.py` fits them to published runs, within physical bounds, and writes the
values into this file. The speeds of devices (devices.py) come from data sheets and measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Constants:
    """Constants of time, then of memory (from `logits_held` on).

    Attributes:
        matmul_share: Speed of matmuls in a model, as a share of the device's best matmul.
        hopper_matmul: Factor of matmul_share on Hopper, whose clock is limited by power.
        tpu_matmul_share: Matmul_share of XLA's matmuls on TPUs.
        narrow_width: Model width at which matmuls reach half of their speed.
        expert_share: Factor of matmul_share in blocks with experts, whose tokens are sorted and
            sent.
        elementwise_passes: Factor of the bytes that elementwise kernels read and write.
        compiled_passes: Share of these bytes, and of kernels, that remains under torch.compile.
        xla_passes: The same under XLA, which fuses whole blocks.
        logits_bytes: Bytes read and written per logit, in loss and gradient.
        attention_share: Speed of flash attention, as a share of a matmul's.
        hopper_attention: Factor of attention_share on Hopper with version 2 of the kernels.
        tuned_attention: Factor of attention_share with cuDNN or Transformer Engine.
        link_share: Bandwidth of collectives in a host, as a share of the links'.
        fabric_share: Bandwidth of collectives between hosts, as a share of the fabric's.
        overlap: Exponent of the p-norm that joins work and communication; 1 is no overlap.
        wait_s: Seconds that a collective waits for its slowest rank, per doubling of ranks.
        launch_s: Seconds of host time to launch a block's forward.
        fp8_speedup: Speedup of matmuls in fp8, casts included.
        logits_held: Bytes per logit: 16 bits, float32, log-probability, both gradients.
        fused_logits: Bytes per logit in a compiled loss.
        gathered_blocks: Blocks that are gathered at once: this one, the next, the receive buffer.
        cached_share: Memory reserved in addition to the larger moment of backward, as a share of
            the smaller one.
        base_gib: GiB of library workspaces and small fragments.
    """

    matmul_share: float = 0.8902
    hopper_matmul: float = 0.8064
    tpu_matmul_share: float = 0.8595
    narrow_width: float = 251.6
    expert_share: float = 0.5904
    elementwise_passes: float = 1.86
    compiled_passes: float = 0.273
    xla_passes: float = 0.5517
    logits_bytes: float = 36.06
    attention_share: float = 0.39
    hopper_attention: float = 0.6104
    tuned_attention: float = 2.5
    link_share: float = 0.5487
    fabric_share: float = 0.9609
    overlap: float = 2.672
    wait_s: float = 0.0005956
    launch_s: float = 0.0004918
    fp8_speedup: float = 1.817
    logits_held: float = 13.37
    fused_logits: float = 2.338
    gathered_blocks: float = 3.0
    cached_share: float = 0.8308
    base_gib: float = 1.491


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
