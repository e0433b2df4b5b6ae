"""Norms, clipping and loss scaling with torch's own functions and with ours."""

import math
from functools import partial

import pytest
import torch
from torch import nn

import fullshard as fs
from support.grid import chequered, marked
from support.ranks import on_ranks
from support.scripts import compare, counted, error_of, sharded_run

ORDERS = [1.0, 2.0, 3.0, math.inf]
CLIP = 0.05  # below every norm here, so that clipping changes the weights
nn_utils = nn.utils


def trained(run, clip, num_steps=3):
    """Three steps of momentum with a clipping call between backward and step."""
    model = run.shard(run.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    logged = []
    for step in range(num_steps):
        run.loss(model, step).backward()
        logged.append(clip(model))
        optimizer.step()
        optimizer.zero_grad()
    return run.result(model, logged=logged)


# ---- calls in users' scripts -------------------------------------------------------------------


def clip_norm(model, **options):
    return nn_utils.clip_grad_norm_(model.parameters(), CLIP, **options)


def clip_nothing(model):
    return nn_utils.clip_grad_norm_(model.parameters(), 1e9, error_if_nonfinite=True)


def clip_value(model, **options):
    return nn_utils.clip_grad_value_(model.parameters(), 1e-3, **options)


def clip_in_two_steps(model):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    total = nn_utils.get_total_norm(grads, norm_type=2.0)
    nn_utils.clip_grads_with_norm_(model.parameters(), CLIP, total)
    return total


def clip_each_block(model):
    return [nn_utils.clip_grad_norm_(block.parameters(), CLIP / 2) for block in model.blocks]


def clip_one_parameter(model):
    return nn_utils.clip_grad_norm_(model.head.weight, CLIP)


def clip_twice(model):
    return [clip_norm(model), clip_norm(model)]


def total_norm_of_old_scripts(model):
    total = 0.0
    for p in model.parameters():
        if p.grad is not None:
            total += p.grad.detach().data.norm(2).item() ** 2
    return total**0.5


def total_norm_by_stacking(model):
    norms = [torch.norm(p.grad, 2) for p in model.parameters() if p.grad is not None]
    return torch.norm(torch.stack(norms), 2)


def norms_by_name(model):
    return {
        name: [p.grad.norm(), torch.linalg.vector_norm(p.grad), p.grad.norm(p=1), p.grad.norm(2.5)]
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def halve_by_hand(model):
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)
    return total_norm_by_stacking(model)


def halve_through_data(model):
    for number, p in enumerate(model.parameters()):
        if p.grad is not None and number % 2:
            p.grad.set_(p.grad / 2 + 0.01)
        elif p.grad is not None:
            p.grad.data = p.grad.data / 2
            p.grad.data.add_(0.01)
    return [total_norm_by_stacking(model), clip_norm(model)]


def replace(model):
    for p in model.parameters():
        if p.grad is not None:
            p.grad = p.grad.clamp(-0.01, 0.01)
    return [total_norm_by_stacking(model), clip_norm(model)]


def assign_plain(model):
    for p in model.parameters():
        p.grad = torch.full(p.shape, 0.01, dtype=p.dtype)
    return [total_norm_by_stacking(model), clip_norm(model)]


def assign_zeros(model):
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    return [total_norm_by_stacking(model), clip_norm(model)]


def write_out(model):
    grad = model.head.weight.grad
    with torch.no_grad():
        torch.mul(grad, 0.5, out=grad)
    return total_norm_by_stacking(model)


def grads_of(model):
    return [p.grad for p in model.parameters() if p.grad is not None]


def first_replaced_and_all_scaled(model):
    model.embed.weight.grad = model.embed.weight.grad.clone()
    torch._foreach_mul_(grads_of(model), 0.25)
    return [g.norm() for g in grads_of(model)][1:]


def scaled_by_keyword(model):
    torch._foreach_mul_(scalar=0.25, self=grads_of(model))
    return clip_norm(model)


def written_by_an_option(model):
    nn.functional.hardtanh(model.head.weight.grad, -1e-3, 1e-3, inplace=True)
    return clip_norm(model)


def written_through_lists_as_out(model):
    grads = grads_of(model)
    with torch.no_grad():
        torch.add(grads[-1], grads[-1], out=grads[-1])
    return clip_norm(model)


def halve_local_parts(model):
    """Norms are computed again after writes through a plain tensor."""
    before = total_norm_by_stacking(model)
    for grad in grads_of(model):
        (grad.to_local() if hasattr(grad, "to_local") else grad).mul_(0.5)
    return [before, total_norm_by_stacking(model), grads_of(model)[0].norm(), clip_norm(model)]


LINES = {
    "halved through to_local": halve_local_parts,
    "the first one replaced, all scaled": first_replaced_and_all_scaled,
    "scaled by keyword": scaled_by_keyword,
    "written by an option": written_by_an_option,
    "written as out": written_through_lists_as_out,
    **{
        f"clip_grad_norm_, order {order}, foreach {foreach}": partial(
            clip_norm, norm_type=order, foreach=foreach
        )
        for order in ORDERS
        for foreach in (None, True, False)
    },
    "clip_grad_norm_ above the norm": clip_nothing,
    "clip_grad_norm_ of a given order in words": partial(clip_norm, norm_type="inf"),
    "clip_grad_value_": clip_value,
    "clip_grad_value_, a loop": partial(clip_value, foreach=False),
    "get_total_norm and clip_grads_with_norm_": clip_in_two_steps,
    "each block by itself": clip_each_block,
    "one parameter": clip_one_parameter,
    "twice": clip_twice,
    "total norm of old scripts": total_norm_of_old_scripts,
    "total norm by stacking": total_norm_by_stacking,
    "norms by name": norms_by_name,
    "gradients halved by hand": halve_by_hand,
    "gradients written through .data": halve_through_data,
    "gradients replaced": replace,
    "plain gradients assigned": assign_plain,
    "zeros for gradients that are none": assign_zeros,
    "gradients as out": write_out,
}
ALIKE = [
    *[name for name in LINES if name.startswith("clip_grad_norm_, order")][1::2],
    "clip_grad_norm_ of a given order in words",
    "clip_grad_value_, a loop",
    "gradients as out",
    "gradients halved by hand",
    "total norm of old scripts",
    "twice",
    "scaled by keyword",
    "one parameter",
]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *marked([(name, 2) for name in LINES], lambda name, _: name not in ALIKE, pytest.mark.long),
        pytest.param("norms by name", 3, marks=pytest.mark.slow),
    ],
)
@on_ranks("size")
def test_calls_of_torch_give_the_results_of_one_process(name):
    compare(partial(trained, clip=LINES[name]))


@on_ranks(2)
def test_torchs_clipping_takes_its_foreach_path():
    run, model = sharded_run()
    run.loss(model, 0).backward()
    with counted("_foreach_norm", "_foreach_mul_") as calls:
        clip_norm(model)
    assert [call.call_count for call in calls.values()] == [1, 1]


# ---- fs.clip_grad_norm_ -----------------------------------------------------------------------


def clip_ours(run, order, strategy):
    """Compares fs.clip_grad_norm_ with torch, also after an edit and with frozen weights."""
    model = run.model()
    model.blocks[1].requires_grad_(False)
    run.shard(model, strategy=strategy)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    clip = partial(fs.clip_grad_norm_, model)
    if not run.sharded:
        clip = partial(nn_utils.clip_grad_norm_, list(model.parameters()))
    logged = []
    for step in range(3):
        run.loss(model, step).backward()
        logged.append(clip(CLIP, order))
        model.head.weight.grad *= 3
        logged.append(clip(CLIP, order))
        model.scale.grad = model.scale.grad * 2
        logged.append(clip(CLIP, order))
        logged.append(clip(1e9, order))
        optimizer.step()
        optimizer.zero_grad()
    return run.result(model, logged=logged)


@pytest.mark.short(2)
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard", "shard_grad_op"])
def test_our_clipping_equals_torchs_in_one_process(ranks, strategy):
    for order in ORDERS:
        ranks(2)(compare, partial(clip_ours, order=order, strategy=strategy))


def some_left_out(run, ours):
    """Two parameters are not sharded; the script sums their gradients over the ranks."""
    model = run.shard(run.model(), ignore=["scale", "blocks.1.up.*"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    left_out = [model.scale, model.blocks[1].up.weight, model.blocks[1].up.bias]
    norms = []
    for step in range(3):
        run.loss(model, step).backward()
        if run.sharded:
            for param in left_out:
                torch.distributed.all_reduce(param.grad)
                param.grad /= run.world_size
        if ours and run.sharded:
            norms.append(fs.clip_grad_norm_(model, CLIP))
        else:
            norms.append(nn_utils.clip_grad_norm_(model.parameters(), CLIP))
        optimizer.step()
        optimizer.zero_grad()
    return run.result(model, norms=norms)


@pytest.mark.parametrize("ours", [False, True])
def test_ignored_parameters_are_clipped_too(ranks, ours):
    ranks(2)(compare, partial(some_left_out, ours=ours))


@on_ranks(2)
def test_an_ignored_parameters_gradient_is_clipped_without_others():
    """The only gradient belongs to an ignored parameter, before any backward."""
    _, model = sharded_run(ignore=["scale"])
    model.scale.grad = torch.full_like(model.scale, 3.0)
    assert {fs.clip_grad_norm_(model, 10.0, order).item() for order in ORDERS} == {3.0}


def clip_beside_unequal_gradients():
    """Only one rank has a gradient, a large one, of an ignored parameter."""
    run, model = sharded_run(ignore=["scale"])
    run.loss(model, 0).backward()
    model.scale.grad = torch.full_like(model.scale, 100.0) if run.rank == 0 else None
    return fs.clip_grad_norm_(model, CLIP).item(), fs.global_norm([model.head.weight.grad]).item()


def test_ranks_scale_equally_if_ignored_gradients_differ(ranks):
    one, other = ranks(2)(clip_beside_unequal_gradients)
    assert one == other
    assert one[0] > 100


def norms_of_the_model(run):
    model = run.shard(run.model())
    run.loss(model, 0).backward()
    params = list(model.parameters())
    grads = [p.grad for p in params if p.grad is not None]
    moments = [p.detach() * 2 + 1 for p in params]
    if run.sharded:
        return [fs.global_norm(x, o) for x in (params, grads, moments) for o in ORDERS]
    return [
        torch.linalg.vector_norm(torch.cat([t.detach().flatten() for t in x]), o)
        for x in (params, grads, moments)
        for o in ORDERS
    ]


def test_global_norm_is_the_norm_of_full_gradients(ranks):
    ranks(2)(compare, norms_of_the_model)


@on_ranks(2)
def test_the_global_norm_includes_writes_of_one_rank():
    run, model = sharded_run()
    run.loss(model, 0).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if torch.distributed.get_rank() == 1:
        grads[0].mul_(3.0)
    squares = torch.stack([g.to_local().double().pow(2).sum() for g in grads]).sum()
    torch.distributed.all_reduce(squares)
    assert fs.global_norm(grads).item() == pytest.approx(squares.sqrt().item(), rel=1e-12)


@on_ranks(2)
def test_without_gradients_the_norm_is_zero():
    _, model = sharded_run()
    norm = fs.clip_grad_norm_(model, 1.0)
    assert (norm.item(), type(norm).__name__, norm.dim()) == (0.0, "Tensor", 0)


@on_ranks(2)
def test_a_norm_that_is_not_finite_is_an_error_on_every_rank():
    run, model = sharded_run()
    (run.loss(model, 0) * math.inf).backward()
    params = list(model.parameters())
    strict = partial(nn_utils.clip_grad_norm_, params, 1.0, error_if_nonfinite=True)
    assert "The total norm of order 2.0 for gradients" in error_of(strict)
    assert str(fs.clip_grad_norm_(model, 1.0)) == "tensor(nan, dtype=torch.float64)"
    assert all(p.grad.isnan().to_local().all() for p in params if p.grad is not None)


# ---- several models ---------------------------------------------------------------------------


def several_models(run, strategies, **config):
    """One optimizer and one list for two models; unscaled, clipped separately and together."""
    models = [run.shard(run.model(), strategy=kind, **config) for kind in strategies]
    params = [p for model in models for p in model.parameters()]
    optimizer = torch.optim.AdamW(params, lr=1e-2, foreach=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    logged = []
    for step in range(2):
        loss = run.loss(models[0], step) + 2 * run.loss(models[1], step + 5)
        scaler.scale(loss).backward()
        before = [nn_utils.clip_grad_norm_(model.parameters(), 1e9) for model in models]
        scaler.unscale_(optimizer)
        after = [nn_utils.clip_grad_norm_(model.parameters(), CLIP) for model in models]
        together = [nn_utils.clip_grad_norm_(params, CLIP / 2)]
        together += map(torch.norm, grads_of(models[1]))
        whole = nn_utils.get_total_norm([p.detach() for p in params])
        logged.append([before, after, together, whole])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    if run.sharded:
        torch.testing.assert_close(fs.global_norm(params), whole_norm(models))
    return [run.result(model, logged=logged) for model in models]


def whole_norm(models):
    wholes = [w for m in models for w in fs.full_state_dict(m, rank0_only=False).items()]
    names = {name for name, _ in models[0].named_parameters()}
    return nn_utils.get_total_norm([w for name, w in wholes if name in names])


@pytest.mark.short(3)
@pytest.mark.parametrize("transport", ["shared", "c10d", "one of each", "direct", "no_shard"])
def test_lists_with_shards_of_several_models_give_right_results(ranks, transport):
    kinds = {"no_shard": ("no_shard",) * 2, "one of each": ("no_shard", "full_shard")}
    config = {} if transport in kinds else {"transport": transport}
    strategies = kinds.get(transport, ("full_shard",) * 2)
    ranks(2)(compare, partial(several_models, strategies=strategies, **config))


def fused_with_a_scale(run):
    """A fused optimizer writes the gradients that it unscales."""
    model = run.shard(run.model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(run.loss(model, 0)).backward()
    before = nn_utils.get_total_norm(grads_of(model))
    scaler.step(optimizer)
    return run.result(model, norms=[before, nn_utils.get_total_norm(grads_of(model))])


def test_a_norm_after_a_fused_step_uses_the_unscaled_gradients(ranks):
    ranks(2)(compare, fused_with_a_scale)


# ---- one rank alone ---------------------------------------------------------------------------


def log_on_rank_zero_only():
    """Computes norms on one rank in every spelling that needs no collective."""
    rank = torch.distributed.get_rank()
    run, model = sharded_run()
    run.loss(model, 0).backward()
    norms = None
    if rank == 0:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norms = [
            model.head.weight.grad.norm().item(),
            model.head.weight.grad.data.norm(2).item(),
            model.head.weight.grad.detach().norm(p=2).item(),
            torch.norm(model.head.weight.grad.view(-1)).item(),
            torch.linalg.vector_norm(model.head.weight.grad).item(),
            nn_utils.get_total_norm([model.head.weight.grad]).item(),
            nn_utils.get_total_norm(grads).item(),
        ]
    total = fs.clip_grad_norm_(model, 1.0).item()
    if rank == 0:  # also known after our clipping
        norms += [total, nn_utils.get_total_norm(grads).item(), min(total, 1.0)]
    run.loss(model, 1).backward()
    return norms


def test_a_norm_logged_on_one_rank_does_not_hang(ranks):
    norms, nothing = ranks(2)(log_on_rank_zero_only)
    assert nothing is None
    assert norms[:6] == pytest.approx([norms[0]] * 6, rel=1e-12)
    assert norms[6] == pytest.approx(norms[7], rel=1e-12)
    assert norms[8] == pytest.approx(norms[9], rel=1e-5)
    assert norms[0] < norms[6]


# ---- loss scaling -----------------------------------------------------------------------------


def scaled(run, fused, overflow=None):
    """Uses GradScaler, unscale_ and clipping; in step 1 one gradient element is infinite."""
    model = run.shard(run.model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales, norms = [], []
    for step in range(4):
        scaler.scale(run.loss(model, step)).backward()
        if step == 1 and overflow:
            overflow(model)
        if not fused or step == 2:  # both ways in scripts
            scaler.unscale_(optimizer)
            norms.append(nn_utils.clip_grad_norm_(model.parameters(), CLIP))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return run.result(model, scales=scales, norms=norms)


def one_element(model):
    """An infinity in the last element of a matrix, which one rank stores."""
    grad = model.blocks[0].mid.weight.grad
    flat = grad.to_local() if hasattr(grad, "to_local") else grad
    holds_last = (
        not hasattr(grad, "to_local") or fs.sharding(model.blocks[0].mid.weight).stop == 484
    )
    if holds_last:
        flat.view(-1)[-1] = math.inf


@pytest.mark.parametrize(("overflow", "fused"), chequered([None, one_element], [False, True]))
def test_the_loss_scaler_works_and_an_infinity_of_one_rank_makes_all_skip(ranks, fused, overflow):
    ranks(2)(compare, partial(scaled, fused=fused, overflow=overflow))
