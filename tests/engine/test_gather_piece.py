"""A gathered parameter needs memory for itself and a small buffer, not for its whole unit."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard as fs
from fullshard.engine import computed
from fullshard.engine.engine import engine_of
from support.ranks import on_ranks

SIZES = ((7, 5), (300, 9), (3, 1), (64, 64))


def model():
    made = nn.Sequential(*(nn.Linear(*size) for size in SIZES))
    made.register_parameter("empty", nn.Parameter(torch.empty(0, 4)))
    return made


@pytest.mark.short(6)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("transport", ["direct", "c10d"])
@pytest.mark.parametrize("sent_bytes", [64, 1 << 20])
@on_ranks("num_ranks")
def test_messages_of_a_gather_are_small_for_any_unit(transport, sent_bytes):
    torch.manual_seed(0)
    ours = model()
    torch.manual_seed(0)
    expected = {name: param.detach().clone() for name, param in model().named_parameters()}
    fs.shard(ours, strategy="full_shard", wrap="none", transport=transport)
    carrier = engine_of(ours).units[0].transport
    sizes: list[int] = []
    fetch = carrier.fetch

    def spy(fulls):
        sizes.extend(full.nbytes for full in fulls)
        return fetch(fulls)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(computed, "SENT_BYTES", sent_bytes)
        patch.setattr(carrier, "fetch", spy)
        for name, param in ours.named_parameters():
            sizes.clear()
            whole = param.full_tensor()  # type: ignore[operator]
            assert torch.equal(whole, expected[name]), name
            rounding = 4 * dist.get_world_size()
            assert (
                max(sizes, default=0) <= max(expected[name].nbytes // 16, sent_bytes) + rounding
            ), name
