"""A rule of thumb for the memory of a training step, where only the number of parameters is known.

`fs.plan(model, config)` knows it to the byte, of a model and a configuration.
"""

from __future__ import annotations

from fullshard.config.values import Strategy, parse
from fullshard.planner.strategy import row_of

GB = 1e9  # the habit of the documents that call this; elsewhere we say bytes
SLOTS = 2  # units that are gathered at once, with a prefetch depth of one


def estimate_fsdp_memory(  # noqa: PLR0913  (the documents' signature, and what they leave out)
    model_params_billions: float,
    world_size: int = 8,
    mixed_precision: bool = True,  # noqa: FBT001, FBT002  the documents' signature
    sharding_strategy: object = "FULL_SHARD",
    *,
    optimizer_bytes: float = 8.0,
    num_units: int = 32,
    ranks_per_host: int = 8,
) -> dict[str, float]:
    """Memory of one rank, activations aside, in GB of 1e9 bytes.

    With P parameters, S ranks that share one copy (all; those of a host for hybrid strategies; one
    under NO_SHARD), U units, c bytes a parameter in compute (2 in mixed precision, else 4), and o
    bytes a parameter of the optimizer's states (8: Adam's two moments in float32):

        params      4 P / S              the float32 master, which mixed precision keeps
        gradients   4 P / S              float32 sums
        optimizer   o P / S
        temporary   gathered weights + unreduced gradients
                    full_shard           c 2P/U + 4 2P/U     two units at once, not the model
                    shard_grad_op        c P    + 4 2P/U     the model stays gathered
                    no_shard             (c P in mixed precision) + 4 2P/U

    Args:
        model_params_billions: P / 1e9.
        world_size: Ranks.
        mixed_precision: Whether weights are computed with in 16 bits.
        sharding_strategy: In any spelling, or torch's ShardingStrategy.
        optimizer_bytes: o.
        num_units: U.
        ranks_per_host: Ranks that hybrid strategies shard over.

    Raises:
        ConfigError: An unknown strategy (a ValueError).
    """
    name = getattr(sharding_strategy, "name", sharding_strategy)
    row = row_of(parse(Strategy, str(name).removeprefix("_"), "sharding_strategy"))
    params = model_params_billions * 1e9
    ranks = min(world_size, ranks_per_host) if row.hybrid else world_size
    shard = ranks if row.shard_params else 1
    compute = 2 if mixed_precision else 4
    window = min(SLOTS, num_units) * params / num_units
    if row.reshard_after_forward:
        gathered = compute * window
    elif row.shard_params:
        gathered = compute * params
    else:
        gathered = compute * params if mixed_precision else 0.0
    found = {
        "params_gb": 4 * params / shard / GB,
        "gradients_gb": 4 * params / shard / GB,
        "optimizer_gb": optimizer_bytes * params / shard / GB,
        "temporary_gb": (gathered + 4 * window) / GB,
    }
    return {**found, "total_gb": sum(found.values())}
