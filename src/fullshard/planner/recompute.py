"""Which modules' forwards run again in backward, so that their activations need not be kept.

activation_checkpointing   recomputed
none                       nothing
block, selective           every repeated block
every_k                    block 0, k, 2k ... of each list of blocks
"""

from __future__ import annotations

from itertools import groupby

from fullshard.config.values import Recompute, RecomputeKind
from fullshard.errors import WrapError
from fullshard.planner.spec import ModelSpec, parent_name
from fullshard.planner.wrap import repeated_blocks


def recomputed_modules(spec: ModelSpec, recompute: Recompute) -> tuple[str, ...]:
    """Names of the modules, whatever the units are.

    Raises:
        WrapError: The model has no repeated blocks.
    """
    if recompute.kind is RecomputeKind.NONE:
        return ()
    blocks = repeated_blocks(spec)
    if not blocks:
        raise WrapError(
            f"activation_checkpointing: {recompute} expects a list of like blocks; {spec.kind} has "
            "none. Call torch.utils.checkpoint.checkpoint(..., use_reentrant=False) in its forward."
        )
    return tuple(
        name
        for _, members in groupby(blocks, key=parent_name)
        for name in list(members)[:: recompute.every]
    )
