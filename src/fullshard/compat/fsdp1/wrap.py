"""torch.distributed.fsdp.wrap: torch's own policies, `wrap` and `enable_wrap`.

They call the given wrapper class: `enable_wrap(wrapper_cls=FullyShardedDataParallel)`.
"""

from torch.distributed.fsdp.wrap import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
from torch.distributed.fsdp.wrap import __all__ as __all__
from torch.distributed.fsdp.wrap import _or_policy as _or_policy
from torch.distributed.fsdp.wrap import _Policy as _Policy
from torch.distributed.fsdp.wrap import (
    _wrap_module_cls_individually as _wrap_module_cls_individually,
)
from torch.distributed.fsdp.wrap import wrap

from fullshard.compat.checkpoint_wrapper import make_callable

make_callable(__name__, wrap)
