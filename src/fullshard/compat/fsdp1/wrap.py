"""torch.distributed.fsdp.wrap: torch's own policies, `wrap` and `enable_wrap`.

They call whatever wrapper they are given: `enable_wrap(wrapper_cls=FullyShardedDataParallel)`.
"""

from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)
from torch.distributed.fsdp.wrap import _or_policy as _or_policy
from torch.distributed.fsdp.wrap import _Policy as _Policy
from torch.distributed.fsdp.wrap import (
    _wrap_module_cls_individually as _wrap_module_cls_individually,
)

from fullshard.compat.callable_module import make_callable

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]

make_callable(__name__, wrap)
