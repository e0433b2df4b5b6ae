"""Every kind of model that `fullshard bench step` times trains equally on ours and FSDP2."""

from dataclasses import replace

import pytest
import torch

from fullshard.bench.engines import BUILDERS, Experts, Feeder, Setup, build_model
from fullshard.bench.step import CASES, LOSS_TOLERANCE, PEERS, unfit_of

TINY = {
    name: replace(CASES["tiny"], name=name, kind=CASES[name].kind, compute=CASES[name].compute)
    for name in ("109M-bf16", "moe", "lora")
}
NUM_STEPS = 4


def losses_of(case, engine):
    feeder = Feeder(case, BUILDERS[engine](Setup(case, seed=0, learning_rate=1e-2)))
    return [feeder.mean_loss() for _ in range(NUM_STEPS)]


@pytest.mark.parametrize("name", TINY)
def test_a_case_has_equal_losses_in_ours_and_fsdp2(ranks, name):
    case = TINY[name]
    pool = ranks(case.num_ranks)
    ours, theirs, floor = (
        pool(losses_of, case, engine)[0] for engine in ("fullshard", "fsdp2", "floor")
    )
    # A sum of two ranks has only one order, so the tolerance of float32 holds in bfloat16 too.
    assert ours == pytest.approx(theirs, rel=LOSS_TOLERANCE["float32"])
    # The floor does not train, so equality after the first step is significant.
    assert floor[0] == pytest.approx(theirs[0], rel=LOSS_TOLERANCE["float32"])
    assert floor[1:] != pytest.approx(theirs[1:], rel=LOSS_TOLERANCE["float32"])


def test_bf16_compute_shows_in_the_losses(ranks):
    case = TINY["109M-bf16"]
    narrow, wide = (
        ranks(case.num_ranks)(losses_of, shape, "fullshard")[0] for shape in (case, CASES["tiny"])
    )
    assert narrow != pytest.approx(wide, rel=LOSS_TOLERANCE["float32"])


@pytest.mark.parametrize("name", TINY)
def test_a_case_knows_the_size_of_its_model(name):
    case = TINY[name]
    assert case.numel == sum(p.numel() for p in build_model(case, seed=0).parameters())


def test_an_adapted_model_trains_its_adapters_alone():
    model = build_model(TINY["lora"], seed=0)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 4 * TINY["lora"].layers
    assert all("narrow" in name or "widen" in name for name in trained)


def test_an_expert_without_tokens_has_a_gradient_of_zeros():
    torch.manual_seed(0)
    experts = Experts(16)
    experts(torch.randn(1, 1, 16)).sum().backward()
    sizes = [float(p.grad.abs().sum()) for p in experts.parameters() if p.grad is not None]
    assert len(sizes) == len(list(experts.parameters()))
    assert sum(size > 0 for size in sizes) < len(sizes)


def test_an_engine_that_cannot_run_a_case_is_named_with_the_reason():
    peers = list(PEERS.values())
    assert set(unfit_of(CASES["109M-bf16"], peers)) == {"ddp", "deepspeed", "deepspeed-zero2"}
    assert unfit_of(CASES["109M"], peers) == {}
