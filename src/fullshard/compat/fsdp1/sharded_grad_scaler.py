"""torch.distributed.fsdp.sharded_grad_scaler: torch's own.

`unscale_` sees shards, whose check for infinities spans all ranks by itself.
"""

from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

__all__ = ["ShardedGradScaler"]
