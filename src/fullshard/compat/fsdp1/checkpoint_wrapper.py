"""torch.distributed.algorithms._checkpoint.checkpoint_wrapper, acting in place."""

from fullshard.compat.checkpoint_wrapper import *  # noqa: F403
from fullshard.compat.checkpoint_wrapper import __all__ as __all__
from fullshard.compat.checkpoint_wrapper import checkpoint_wrapper, make_callable

make_callable(__name__, checkpoint_wrapper)
