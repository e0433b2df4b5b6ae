"""torch.distributed.fsdp.sharded_grad_scaler: torch's own, on the device of the losses.

`unscale_` sees shards, whose check for infinities spans all ranks by itself. torch's is made for
CUDA unless told otherwise, and switches itself off, with a warning, where there is none: a model on
CPUs would then train with unscaled gradients, and an infinity would reach all weights.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as _TorchsScaler

from fullshard.engine._torch_compat import tree_leaves

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(_TorchsScaler):
    """Scales losses on whatever device they are.

    Args:
        device: None takes that of the first loss.
        settings: As torch's.
    """

    def __init__(self, device: str | None = None, *settings: Any, **more: Any) -> None:
        super().__init__(device or "cpu", *settings, **more)
        self._follows = device is None

    def scale(self, outputs: Any) -> Any:
        """Multiply losses by the scale."""
        if self._follows:
            self._device = tree_leaves(outputs)[0].device.type
        return super().scale(outputs)
