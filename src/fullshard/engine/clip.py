"""Clipping and norms over all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from fullshard.engine._torch_compat import no_guard
from fullshard.engine.engine import Engine, engine_of
from fullshard.engine.guard import norm_order
from fullshard.engine.norms import by_model, is_at_hand, total_norm
from fullshard.engine.parameter import Guarded
from fullshard.errors import ShardedTensorError


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale all gradients so that their norm is at most `max_norm`.

    The 2-norm was computed at the end of the backward, so clipping reads no gradient; on a CPU,
    ranks compare whether one of them wrote into its gradients since. Other norms are a collective.
    The factor is min(1, max_norm / (norm + 1e-6)), as in `torch.nn.utils.clip_grad_norm_`.

    Parameters left out of sharding (`ignore`) are included; the user must reduce their gradients.
    If their norms differ between ranks, all ranks use the largest one, so that the shards of a
    parameter are scaled equally. This needs a collective.

    Args:
        model: A sharded model.
        max_norm: Largest norm allowed.
        norm_type: p of the p-norm; `inf` for the largest absolute value.

    Returns:
        The norm before clipping: a plain replicated scalar.
    """
    engine = engine_of(model)
    with no_guard():
        trained = [m for m in engine.members if m.grad is not None]
        shown = [m.param.grad for m in trained if m.param.grad is not None]
    others = _left_out(model) if engine.config.ignore else []
    order = norm_order(norm_type)
    apart = _largest_norm(engine, others, order) if engine.config.ignore else None
    if not shown and not others:
        return torch.zeros((), device=engine.device)
    engine.norms.begin_clipping(max_norm)
    norm = total_norm(shown, order)
    if apart is not None:
        norm = torch.linalg.vector_norm(torch.stack([norm, apart.to(norm)]), order)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    # Also applied if it is NaN, which then reaches every weight, as in torch.
    if not is_at_hand(factor.device) or not factor >= 1.0:
        ours = {id(m.grad) for m in trained}
        for group in engine.groups:
            if group.grads is not None:
                group.grads.scale(factor)
        replaced = [grad for grad in shown if id(grad) not in ours]  # by the user, since backward
        for grad in replaced + others:
            grad.mul_(factor.to(grad.device, grad.dtype))
        engine.norms.scale(factor)
    like = (shown + others)[0]
    return norm.to(like.device, like.dtype)


def _left_out(model: nn.Module) -> list[torch.Tensor]:
    """Gradients of the parameters that are left out of sharding."""
    plain = (param for param in model.parameters() if not isinstance(param, Guarded))
    return [param.grad for param in plain if param.grad is not None]


def _largest_norm(engine: Engine, grads: list[torch.Tensor], order: float) -> torch.Tensor:
    """The largest norm over ranks of gradients other than shards."""
    norms = [torch.linalg.vector_norm(grad, order).double() for grad in grads]
    own = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64)
    largest = torch.linalg.vector_norm(own, order).to(engine.device).view(1)
    return engine.norms.maxima(largest, "fs.clip_grad_norm_").squeeze()


def global_norm(params: Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """The norm of whole parameters, gradients or states together. A collective.

    Args:
        params: Shards, of one sharded model or several.
        norm_type: p of the p-norm; `inf` for the largest absolute value.

    Returns:
        A plain replicated float64 scalar.
    """
    shards = list(params)
    guards = [shard for shard in shards if isinstance(shard, Guarded)]
    if not guards:
        if shards:
            raise ShardedTensorError(
                "fs.global_norm: expected shards of a sharded model; got plain tensors. Use "
                "torch.linalg.vector_norm for them."
            )
        return torch.zeros((), dtype=torch.float64)
    for norms in by_model(guards):
        norms.mark_changed()  # a rank may have written into its part
    return total_norm(guards, norm_order(norm_type))
