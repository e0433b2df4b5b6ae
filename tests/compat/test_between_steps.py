"""What users do to wrapped models between steps, and from inside of hooks."""

import copy
import os
import pickle
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import fullshard as fs
from fullshard.compat.fsdp1 import FullyShardedDataParallel as FSDP
from fullshard.compat.fsdp1 import MixedPrecision, ModuleWrapPolicy, ShardingStrategy
from fullshard.compat.fsdp2 import fully_shard
from fullshard.errors import EngineError, FullshardError, ShardedTensorError
from support.ranks import on_ranks


def stack():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 7))


@on_ranks(2)
def test_parameters_are_replaced_by_what_was_made_of_shards():
    reference, model = stack(), FSDP(stack())
    for net in (reference, model.module):
        net[0].weight = nn.Parameter(torch.ones_like(net[0].weight) * 2)
        net[1].weight.data = torch.ones_like(net[1].weight) * 3
    x = torch.ones(2, 5)
    torch.testing.assert_close(model(x), reference(x))
    for net in (reference, model.module):  # there is an engine now
        net[1].weight = nn.Parameter(torch.ones_like(net[1].weight))
    torch.testing.assert_close(model(x), reference(x))
    for seen in (False, True):
        model = FSDP(stack())
        if seen:
            model(x)
        model.module[0].weight = nn.Parameter(torch.ones(6, 6))
        with pytest.raises(
            RuntimeError, match=r"Cannot writeback .* 0.weight .*\(5, 5\).*\(6, 6\)"
        ):
            model(x)


@on_ranks(2)
def test_a_write_of_one_rank_into_a_parameter_made_of_a_shard_is_found():
    model = fully_shard(stack())
    model(torch.ones(2, 5))
    model[0].weight = nn.Parameter(model[0].weight.data)
    with torch.no_grad():
        model(torch.ones(2, 5))
        if dist.get_rank() == 1:
            for param in model.parameters():
                param.mul_(2)
    with pytest.raises(EngineError, match="expected as many writes into parameters"):
        model(torch.ones(2, 5)).sum().backward()


@on_ranks(1)
def test_an_average_with_data_of_its_own_is_no_alias_any_more():
    model = fully_shard(stack())
    model(torch.ones(2, 5))
    param = model[0].weight
    average, wrote = param.detach().clone(), param.record.norms.wrote
    average.data = param.data
    average.data = torch.ones(5, 5)
    with torch.no_grad():
        average.mul_(2)
        assert not wrote
        param.data = average.data
        model(torch.ones(2, 5))
        average.mul_(2)
        assert wrote
    assert torch.equal(param.to_local(), torch.full((5, 5), 4.0))


@on_ranks(2)
def test_a_flat_copy_of_a_shard_may_be_assigned():
    reference, model = stack(), fully_shard(stack())
    model(torch.ones(2, 5))
    for param in model.parameters():
        param.data = param.data.clone().view(-1)
    torch.testing.assert_close(model(torch.ones(2, 5)), reference(torch.ones(2, 5)))


@on_ranks(1)
def test_another_thread_may_make_aliases_while_data_are_assigned():
    model = fully_shard(stack())
    model(torch.ones(2, 5))
    ends, averages = threading.Event(), [model[0].weight.detach().clone() for _ in range(300)]

    def make():
        made = []
        while not ends.is_set():
            made = [*made[-500:], model[0].weight.detach()]

    thread = threading.Thread(target=make)
    thread.start()
    try:
        for at in range(20):
            for average in averages:
                average.data = average.data * 0.9
            model[0].weight.data = averages[at].data
            model(torch.ones(2, 5))
    finally:
        ends.set()
        thread.join()


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 7))


def exchange(net):
    """Outputs of a model whose script assigns the data of parameters, again and again."""
    x, params, found = torch.ones(2, 5), list(net.parameters()), []
    own, views = [p.data for p in params], [p.detach().view(-1) for p in params]
    averages = [p.data * 0.5 for p in params]
    optimizer = torch.optim.SGD(params, 0.1)

    def see(*, step=False):
        loss = net(x).square().mean()
        found.append(loss.item())
        if step:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def put(values):
        for param, value in zip(params, values, strict=True):
            param.data = value

    for view in views:
        view.mul_(1.5)
    see(step=True)
    for trains in (False, True):
        put(averages)
        see(step=trains)
        see()
        put(own)
        see(step=True)
        for value in own:
            value.mul_(0.9)
        see()
        for value, average in zip(own, averages, strict=True):
            average.lerp_(value, 0.1)
    for view in views:  # of parameters, still
        view.mul_(1.1)
    see()
    first, second = params[0], params[2]  # alike
    first.data, second.data = second.data, first.data
    see()
    return found


@on_ranks(2)
def test_data_that_is_swapped_in_and_out_is_that_of_one_process():
    wanted, model = exchange(layers()), layers()
    for part in (*model, model):
        fully_shard(part)
    wrapped = FSDP(layers(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    whole = FSDP(layers(), sharding_strategy=ShardingStrategy.NO_SHARD)
    for net in (model, wrapped, whole):
        assert exchange(net) == pytest.approx(wanted, rel=1e-5)


def cloned(param):
    return param.detach().clone()


def as_parameter(param):
    return nn.Parameter(cloned(param), requires_grad=False)


def evaluates_averages(net, average_of, averages=None):
    """Losses of a model whose averages are exchanged with its weights for an evaluation."""
    x, params, found = torch.ones(2, 5), list(net.parameters()), []
    optimizer = torch.optim.SGD(params, 0.1)
    averages = averages or [average_of(param) for param in params]
    views = [average.detach().view(-1) for average in averages]

    def exchange():
        for param, average in zip(params, averages, strict=True):
            param.data, average.data = average.data, param.data

    for _ in range(3):
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for param, average in zip(params, averages, strict=True):
                average.lerp_(param.detach(), 0.5)
        exchange()
        with torch.no_grad():
            found.append(net(x).square().mean().item())
        found += [average.detach().norm().item() for average in averages[::3]]
        exchange()
        found.append(net(x).square().mean().item())
        with torch.no_grad():
            for view in views:
                view.mul_(0.9)
    found.append(net(x).square().mean().item())
    exchange()
    with torch.no_grad():
        for view in views:  # of what are weights now
            view.mul_(0.9)
    found.append(net(x).square().mean().item())
    return found


@pytest.mark.short(3)
@pytest.mark.parametrize("average_of", [cloned, as_parameter, copy.deepcopy])
@pytest.mark.parametrize("wrap", [FSDP, fully_shard])
@on_ranks(2)
def test_averages_that_change_places_with_weights_are_those_of_one_process(wrap, average_of):
    wanted = evaluates_averages(stack(), average_of)
    assert evaluates_averages(wrap(stack()), average_of) == pytest.approx(wanted, rel=1e-5)
    seen = wrap(stack())
    seen(torch.ones(2, 5))
    assert evaluates_averages(seen, average_of) == pytest.approx(wanted, rel=1e-5)


@on_ranks(2)
def test_two_models_change_places():
    wanted, found = (
        evaluates_averages(wrap(stack()), None, list(wrap(stack()).parameters()))
        for wrap in (lambda net: net, FSDP)
    )
    assert found == pytest.approx(wanted, rel=1e-5)


@on_ranks(2)
def test_tensors_of_parameters_that_change_places_are_refused():
    one, other = fully_shard(layers()), fully_shard(layers())
    x = torch.ones(2, 5)
    wanted = [model(x).square().mean().item() for model in (one, other)]
    swap = list(zip(one.parameters(), other.parameters(), strict=True))
    for pair in swap:
        torch.utils.swap_tensors(*pair)
    for model in (one, other):
        with pytest.raises(EngineError, match="expected its own tensor; got that of another"):
            model(x)
    for pair in swap:
        torch.utils.swap_tensors(*pair)
    assert [model(x).square().mean().item() for model in (one, other)] == wanted


@on_ranks(2)
def test_an_average_that_is_put_in_shares_memory_until_another_one_is():
    """`p.data = average.data` shares memory, of which earlier and later views show the same."""
    found = []
    for net in (stack(), FSDP(stack())):
        x, params = torch.ones(2, 5), list(net.parameters())
        net(x)
        averages = [cloned(param) * 0.5 for param in params]
        views = [average.view(-1) for average in averages]
        for param, average in zip(params, averages, strict=True):
            param.data = average.data
        net(x)
        optimizer = torch.optim.SGD(params, 0.1)
        net(x).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            for view in views:
                view.mul_(0.9)
        shown = [tensor.norm().item() for tensor in (*averages, *views, *params)]
        found.append([*shown, net(x).square().mean().item()])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def plain(param):
    return param.to_local() if hasattr(param, "to_local") else param.data


@on_ranks(2)
def test_data_that_stays_in_a_place_keeps_its_values():
    """Also where the shard came back meanwhile, and where shards are exchanged as plain tensors."""
    found = []
    for net in (stack(), FSDP(stack())):
        x, (one, _, two, _) = torch.ones(2, 5), net.parameters()
        net(x)
        averages, alias = [cloned(one) * 0.5, cloned(one) * 0.25], one.data
        old = plain(one)
        one.data = averages[0].data
        del alias
        one.data = old
        new = one.data
        one.data = averages[1].data
        shown = [net(x).square().mean().item(), *(t.norm().item() for t in (new, *averages))]
        with torch.no_grad():
            averages[1].mul_(2)  # shares memory with the parameter
        shown.append(net(x).square().mean().item())
        found.append([*shown, one.detach().norm().item(), two.detach().norm().item()])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    found = []
    for net in (layers(), FSDP(layers())):
        first, second = net[0].weight, net[1].weight
        net(torch.ones(2, 5))
        second.data, first.data = plain(first), plain(second)
        found.append(net(torch.ones(2, 5)).square().mean().item())
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@on_ranks(2)
def test_data_of_new_parameters_and_of_assigned_values_is_shared():
    found = []
    for net in (stack(), fully_shard(stack())):
        x, value = torch.ones(2, 5), None
        net(x)
        net[0].weight = nn.Parameter(torch.ones_like(net[0].weight) * 0.3)
        data = net[0].weight.data
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        net(x).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            data.mul_(2)
        shown = [net(x).square().mean().item(), data.norm().item()]
        param = net[1].weight
        value = torch.ones_like(plain(param))
        param.data = value
        old = param.data
        param.data = param.data * 0.5
        value.mul_(3)
        found.append([*shown, old.norm().item(), net(x).square().mean().item()])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@on_ranks(2)
def test_views_of_an_assigned_whole_value_are_cut_with_it():
    """Also on the rank that has all elements, and on the one without any."""
    found = []
    for net in (layers(), fully_shard(layers())):
        x, (weight, bias, *_) = torch.ones(2, 5), net.parameters()
        net(x)
        weight.data, bias.data = torch.eye(5), torch.ones(5)
        views = [weight.detach(), weight.data.view(-1), bias.data]
        net(x)
        with torch.no_grad():
            for view in views:
                view.mul_(2)
        found.append([net(x).sum().item(), *(view.norm().item() for view in views)])
    assert [tuple(view.shape[1:]) for view in views] == [(1,), (), ()]
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@on_ranks(2)
def test_whole_values_are_assigned_where_one_rank_has_all_elements():
    """Of a bias of five elements that one rank stores, and of a change that shards it again."""
    for thaws in (False, True):
        reference, model = layers(), layers()
        for net in (reference, model):
            net[1].requires_grad_(not thaws)
        model = FSDP(model)
        model(torch.ones(2, 5))
        for net in (reference, model.module):
            net.requires_grad_(True)
            for at, param in enumerate(net.parameters()):
                whole = torch.linspace(0, 1, layers().state_dict()[f"{at // 2}.bias"].numel())
                if at % 2:
                    param.data = whole
        x = torch.ones(2, 5)
        torch.testing.assert_close(model(x), reference(x))


@on_ranks(2)
def test_changes_while_gradients_wait_are_put_off_or_refused():
    reference, model, frozen = stack(), stack(), stack()
    frozen[0].requires_grad_(False)
    for net in (model, frozen):
        for part in (*net, net):
            fully_shard(part)
        net.set_requires_gradient_sync(requires_gradient_sync=False)
        net(torch.ones(2, 5)).sum().backward()
        net.set_requires_gradient_sync(requires_gradient_sync=True)
    model.set_reshard_after_forward(reshard_after_forward=False)
    model(torch.ones(2, 5)).sum().backward()
    frozen[0].requires_grad_(True)
    with pytest.raises(EngineError, match=r"requires_grad, a dtype .* that no_sync deferred"):
        frozen(torch.ones(2, 5))
    frozen.zero_grad()
    frozen(2 * torch.ones(2, 5)).sum().backward()
    for net, scale in ((model, 1.0), (frozen, 2.0)):
        reference.zero_grad()
        for _ in range(2 if net is model else 1):
            reference(scale * torch.ones(2, 5)).sum().backward()
        for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@on_ranks(2)
def test_shards_are_compared_by_torchs_own_means():
    one, two = FSDP(stack()), FSDP(stack())
    for ours, theirs in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    weight = one.module[0].weight
    if dist.get_rank() == 0:  # no collective: each rank looks at its own
        with torch.device("cpu"):
            torch.testing.assert_close(weight.detach(), weight.detach() + 0)
    assert not torch.isclose(weight, weight + 1).all(), "rank 1 compared its part, which is empty"
    for param in one.parameters():  # also where a rank has no elements
        with pytest.raises(ShardedTensorError, match="max along dimensions"):
            param.max(0)
    with pytest.raises(ShardedTensorError, match="expected operands of the shard's own shape"):
        torch.isclose(one.module[0].weight, copy.deepcopy(stack()[0].weight))


def sharded(module):
    fs.shard(module, wrap="none")
    return module


@on_ranks(2)
def test_ddp_may_contain_a_sharded_part_only_if_it_ignores_it():
    """It copies rank 0's parameters to all ranks, here shards of equal sizes."""

    def made(wrap, ignores):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 2))
        net[0] = wrap(net[0])
        names = [name for name, _ in net.named_parameters() if name.startswith("0.")]
        DDP._set_params_and_buffers_to_ignore_for_model(net, names if ignores else [])
        return DDP(net, find_unused_parameters=True)

    x = torch.randn(2, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
    reference = made(lambda module: module, False)
    reference(x).square().sum().backward()
    for wrap in (sharded, FSDP, fully_shard):
        with pytest.raises(EngineError, match="DistributedDataParallel of a sharded model"):
            made(wrap, False)(x)
        model = made(wrap, True)
        model(x).square().sum().backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            grad = getattr(ours.grad, "full_tensor", lambda own=ours.grad: own)()
            torch.testing.assert_close(grad, theirs.grad)


class Tower(nn.Module):
    """Two sharded models in one recomputed part that is not sharded itself."""

    def __init__(self, wrap):
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)) for _ in range(2)]
        self.inside = nn.Sequential(*map(wrap, blocks))
        self.head = nn.Linear(5, 1)

    def forward(self, x):
        return self.head(checkpoint(self.inside, x, use_reentrant=False))


@on_ranks(2)
def test_several_models_in_one_recomputed_part():
    linears = ModuleWrapPolicy({nn.Linear})
    plain, model = Tower(lambda block: block), Tower(lambda b: FSDP(b, auto_wrap_policy=linears))
    for step in range(3):
        x = torch.full((2, 5), 0.1 * (step + 1), requires_grad=True)
        for net in (plain, model):
            net.zero_grad()
            net(x).sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            grad = ours.grad if type(ours) is nn.Parameter else ours.grad.full_tensor()
            torch.testing.assert_close(grad, theirs.grad)


class Noted(nn.Module):
    """Notes what it computes in."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(5, 5)
        self.register_buffer("shift", torch.ones(5))
        self.seen: list[torch.dtype] = []

    def forward(self, x):
        self.seen += [x.dtype, self.line(x).dtype, self.shift.dtype]
        return self.line(x) + self.shift


@on_ranks(2)
def test_evaluation_in_full_precision_where_the_environment_asks():
    low = torch.bfloat16
    precision = MixedPrecision(param_dtype=low, reduce_dtype=torch.float32, buffer_dtype=low)
    os.environ["FSDP_USE_FULL_PREC_IN_EVAL"] = "1"
    try:
        torch.manual_seed(0)
        net = Noted()
        reference = copy.deepcopy(net)
        linears = ModuleWrapPolicy({nn.Linear})
        model = FSDP(net, mixed_precision=precision, auto_wrap_policy=linears)
    finally:
        del os.environ["FSDP_USE_FULL_PREC_IN_EVAL"]
    x = torch.linspace(0, 1, 10).view(2, 5)
    model(x).sum().backward()
    grads = [param.grad.full_tensor() for param in model.parameters()]
    model.eval()
    torch.testing.assert_close(model(x), reference(x))
    for param, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), grad)  # kept
    model.train()
    model(x)
    assert net.seen == [low] * 3 + [torch.float32] * 3 + [low] * 3


@on_ranks(2)
def test_a_profiler_names_gathers_and_reductions():
    """The profiler's tables name gathers and reductions, by unit."""
    for wrap in (
        lambda net: fs.shard(net, wrap=("Linear",), transport="direct"),
        lambda net: FSDP(net, auto_wrap_policy=ModuleWrapPolicy({nn.Linear})),
    ):
        model = wrap(stack())
        with torch.profiler.profile() as profile:
            model(torch.ones(2, 5)).sum().backward()
        names = {row.key for row in profile.key_averages() if row.key.startswith("fullshard ")}
        kinds = {name.split()[1] for name in names}
        assert {"reduce", "accumulate", "settle"} <= kinds, names
        assert "fullshard gather 0" in names or isinstance(model, FSDP), names
        assert "fullshard reduce" in profile.key_averages().table()


@on_ranks(4)
def test_ranks_whose_elements_stay_take_part_when_others_are_cut_anew():
    """Of four ranks, one may keep its range of a parameter while the others get new ones."""
    reference, model = layers(), layers()
    for net in (reference, model):
        net[1].requires_grad_(False)
        net[0].bias.requires_grad_(False)
    for part in (*model, model):
        fully_shard(part)
    for step in range(3):
        for net in (reference, model):
            if step:
                net.requires_grad_(True)
            if step == 2:
                net[0].weight = nn.Parameter(torch.full((5, 5), 0.2))
            net.zero_grad()
            net(torch.ones(2, 5)).square().mean().backward()
            torch.optim.SGD(net.parameters(), 0.1, momentum=0.9).step()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs.detach())


@pytest.mark.short(1)
@on_ranks(3)
@pytest.mark.parametrize("wrap", [fully_shard, FSDP])
def test_whole_data_may_be_assigned_where_one_rank_has_all_elements(wrap):
    """Also before the first forward, and where ranges change in the same step."""
    for first in (0, 1):
        reference, model = layers(), layers()
        for net in (reference, model):
            net[0].bias.requires_grad_(False)
        for at in range(3):
            model[at] = wrap(model[at])
        nets = reference, wrap(model)
        for net in nets:
            optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
            for step in range(4):
                if step == 2:
                    net.requires_grad_(True)
                if step >= first:
                    for other, param in zip(reference.parameters(), net.parameters(), strict=True):
                        param.data = torch.arange(float(other.numel())).view(other.shape) / 30
                net(torch.ones(2, 5)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs.detach())
        list(model.parameters())[4].data = torch.ones(5, 7)
        text = r"2.weight: expected data of shape \(7, 5\) .*got \(5, 7\)"
        with pytest.raises(EngineError, match=text):
            model(torch.ones(2, 5))


@pytest.mark.parametrize("lacks", ["gradients", "gradients of others", "states"])
@on_ranks(2)
def test_ranks_without_elements_take_part_when_others_are_cut_anew(lacks):
    reference, model = layers(), layers()
    for net in (reference, model):
        net[1].requires_grad_(False)
        net[0].bias.requires_grad_(False)
    model, x, momentum = FSDP(model), torch.ones(2, 5), 0.9 * (lacks == "states")
    model(x)
    kept = [param for param in model.parameters() if param.numel() or lacks != "states"]
    assert any(not param.numel() for param in model.parameters())  # on each rank
    for net, params in ((reference, reference.parameters()), (model, kept)):
        optimizer = torch.optim.SGD(params, 0.1, momentum=momentum)
        net(x).square().mean().backward()
        optimizer.step()
        for param in net.parameters() if lacks != "states" else ():
            if bool(param.numel()) == (lacks == "gradients of others"):
                param.grad = None
        net.requires_grad_(True)
    if lacks == "states":
        with pytest.raises(EngineError, match="expected every rank to have its optimizer states"):
            model(x)
        return
    for net in (reference, model):
        net(x).square().mean().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@on_ranks(2)
@pytest.mark.parametrize("wrap", [fully_shard, FSDP])
def test_gradients_of_frozen_parameters_stay_when_others_are_unfrozen(wrap):
    """An optimizer steps by them, as in one process."""
    reference, model = layers(), layers()
    for first, second, net in ((*reference[:2], reference), (*model[:2], None)):
        second.requires_grad_(False)
        net = net or wrap(model)
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        for _ in range(2):
            net(torch.ones(2, 5)).square().mean().backward()
            first.requires_grad_(False)
            second.requires_grad_(True)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
        torch.testing.assert_close(ours.full_tensor(), theirs.detach())


def not_sharded(module):
    return FSDP(module, sharding_strategy=ShardingStrategy.NO_SHARD)


@on_ranks(2)
@pytest.mark.parametrize("wrap", [fully_shard, FSDP, not_sharded])
def test_graphs_from_before_a_change_are_right_or_name_the_change(wrap):
    x = torch.ones(2, 5)
    for joined in (True, False):
        model, one = wrap(stack()), stack()
        losses = []
        for net in (model, one):
            for param in list(net.parameters())[:2]:
                param.requires_grad_(False)
            before = net(x).sum()
            net.requires_grad_(True)
            losses.append((before, net(x).sum()))
        (before, after), others = losses
        if joined:
            with pytest.raises(EngineError, match=r"was sharded again \(a change of requires_grad"):
                (before + after).backward()
            continue
        after.backward()
        others[1].backward()
        if wrap is not_sharded:
            before.backward()
            others[0].backward()
        else:
            with pytest.raises(EngineError, match=r"gave ranks other elements of .*1\.weight"):
                before.backward()
        for ours, theirs in zip(model.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@on_ranks(2)
@pytest.mark.parametrize("first", [0, 1])
def test_graphs_from_before_two_changes_name_the_one_that_cut_anew(first):
    """The first change cuts ranks' elements alike, the second one does not."""
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))
    later = (*model[0].parameters(), model[1].weight)
    for param in later:
        param.requires_grad_(False)
    for part in (*model, model):
        fully_shard(part)
    losses = [model(torch.ones(2, 5)).sum()]
    for part in (model[0], model[1]):
        part.requires_grad_(True)
        losses.append(model(torch.ones(2, 5)).sum())
    with pytest.raises(EngineError, match=r"gave ranks other elements of 1\.bias"):
        losses[first].backward()


@on_ranks(2)
@pytest.mark.parametrize("wrap", [fully_shard, FSDP, not_sharded])
def test_copies_and_pickles_are_refused_by_name_and_shallow_copies_run(wrap):
    x = torch.ones(2, 5)
    for runs_before in (False, True):
        model = wrap(stack())
        if runs_before:
            model(x)
        with pytest.raises(ShardedTensorError, match=r"pickling.*fs\.full_state_dict\(model\)"):
            pickle.dumps(model)
        with pytest.raises(FullshardError, match="deepcopy"):
            copy.deepcopy(model)
        for _ in range(2):
            torch.testing.assert_close(copy.copy(model)(x), stack()(x))  # the copy is deleted
            torch.testing.assert_close(model(x), stack()(x))
            model = copy.copy(model)  # the original is deleted
