"""torch.distributed.fsdp.sharded_grad_scaler: torch's scaler on the device of the losses.

`unscale_` receives shards, whose check for infinities spans all ranks. torch's scaler defaults to
CUDA and, without CUDA, disables itself with a warning. A model on CPUs would then train without
loss scaling or the check for infinities.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as _TorchsScaler

from fullshard.engine._torch_compat import tree_leaves

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(_TorchsScaler):
    """Scales losses on any device.

    Args:
        device: Device type; None: that of the first loss.
        settings: Further arguments of torch's scaler.
    """

    def __init__(self, device: str | None = None, *settings: Any, **more: Any) -> None:
        super().__init__(device or "cpu", *settings, **more)
        self._follows = device is None

    def scale(self, outputs: Any) -> Any:
        """Multiplies losses by the scale."""
        if self._follows:
            self._device = tree_leaves(outputs)[0].device.type
        return super().scale(outputs)
