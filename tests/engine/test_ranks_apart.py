"""Ranks that make different calls: one typed error on every rank, on every transport.

Without it, gloo would end a process whose peer makes another call (transports `direct`, `c10d`),
and ranks that share memory would wait for each other.
"""

import contextlib
import copy
import itertools
import re
from collections.abc import Callable
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import fullshard as fs
from fullshard.config.values import ReductionKind
from fullshard.errors import EngineError
from fullshard.planner.mesh import Mesh
from fullshard.transport import groups
from fullshard.transport.base import Axes
from fullshard.transport.c10d import C10dTransport
from support.grid import chequered
from support.models import generator_of
from support.ranks import on_ranks
from support.scripts import Run, error_of, sharded_run

TRANSPORTS = ("direct", "shared", "c10d", "offloaded")
ODD = (2, 1)  # the step and the rank that differ
REPLICAS = {"strategy": "hybrid_shard", "replicate": 2, "shard": 2}
NO_ERROR = "NO ERROR: NoneType"


def over(transport):
    """Returns settings of a transport; `offloaded` gathers in shared memory."""
    offload = "cpu" if transport == "offloaded" else None
    return {"transport": "shared" if offload else transport, "offload": offload}


class Mine(Exception):
    """An error of the user's code."""


class Raising(torch.autograd.Function):
    """Raises in backward if `raises` is true."""

    @staticmethod
    def forward(ctx, x, raises):
        ctx.raises = raises
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        if ctx.raises():
            raise Mine
        return gradient, None


# ---- one rank makes a different call -------------------------------------------------------------


def skips_backward(run, model, step):
    run.loss(model, step)


def skips_the_loss(run, model, step):
    run.loss(model, step)
    torch.zeros(1, requires_grad=True).sum().backward()


def forward_too_many(run, model, step):
    run.loss(model, 9)
    run.loss(model, step).backward()


def evaluates(run, model, step):
    with torch.no_grad():
        run.loss(model, 9)
    run.loss(model, step).backward()


def calls_a_unit(run, model, step):
    model.blocks[0](torch.zeros(1, 10, dtype=torch.float64))
    run.loss(model, step).backward()


def asks_for_a_maximum(run, model, step):
    run.loss(model, step).backward()
    model.head.weight.grad.abs().max()


def asks_for_a_whole(run, model, step):
    run.loss(model, step).backward()
    model.head.weight.full_tensor()


def asks_for_a_state_dict(run, model, step):
    fs.full_state_dict(model)
    run.loss(model, step).backward()


def saves(run, model, step):
    fs.save("/nowhere", model)
    run.loss(model, step).backward()


def defers(run, model, step):
    with fs.no_sync(model):
        run.loss(model, step).backward()


def defers_once_more(run, model, step):
    defers(run, model, step)
    run.loss(model, step).backward()


def raises_in_forward(run, model, step):
    handle = model.blocks[1].up.register_forward_hook(lambda *_: (_ for _ in ()).throw(Mine()))
    with contextlib.suppress(Mine):
        run.loss(model, step).backward()
    handle.remove()


def raises_in_backward(run, model, step):
    hook = model.blocks[1].mid.register_forward_hook(
        lambda *args: Raising.apply(args[-1], lambda: True)
    )
    with contextlib.suppress(Mine):
        run.loss(model, step).backward()
    hook.remove()


ELSEWHERE: list[Callable[..., None]] = [
    skips_backward,
    skips_the_loss,
    forward_too_many,
    evaluates,
    calls_a_unit,
    asks_for_a_maximum,
    asks_for_a_whole,
    asks_for_a_state_dict,
    saves,
    defers,
    defers_once_more,
    raises_in_forward,
    raises_in_backward,
]


def one_rank_differs(name, transport, strategy="full_shard", sizes=None):
    """Returns the first error, and the error of the next call of a script that continues."""
    rank = torch.distributed.get_rank()
    settings = over(transport) | (sizes or {})
    run, model = sharded_run(strategy=strategy, **settings)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    does = next(odd for odd in ELSEWHERE if odd.__name__ == name)

    def steps():
        for step in range(5):
            if (step, rank) == ODD:
                does(run, model, step)
            else:
                run.loss(model, step).backward()
            try:
                optimizer.step()
            except EngineError as error:  # the rank that deferred; it continues all the same
                refused.append(str(error))
            optimizer.zero_grad()

    refused: list[str] = []
    text = error_of(steps)
    assert all("under no_sync" in said for said in refused), refused
    return [text, text if transport == "shared" else error_of(lambda: run.loss(model, 9))]


@pytest.mark.parametrize(
    ("odd", "transport"), chequered([odd.__name__ for odd in ELSEWHERE], TRANSPORTS, 4)
)
def test_a_rank_that_makes_another_call_is_a_typed_error_on_all(ranks, odd, transport):
    for texts in ranks(2)(one_rank_differs, odd, transport):
        for text in texts:
            assert text.startswith("EngineError: "), text
            assert "ll ranks must make the same calls" in text, text
            assert transport == "shared" or "expected every rank to come here; rank" in text, text


def test_other_strategies_and_replicas_find_different_calls_too(ranks):
    for strategy in ("shard_grad_op", "no_shard"):
        for texts in ranks(2)(one_rank_differs, "skips_backward", "direct", strategy):
            assert texts[0].startswith("EngineError: "), texts
    for transport in ("direct", "c10d"):
        settings = (transport, "hybrid_shard", {"replicate": 2, "shard": 2})
        for texts in ranks(4)(one_rank_differs, "raises_in_backward", *settings):
            assert texts[0].startswith("EngineError: "), texts


@pytest.mark.parametrize(
    ("depth", "name"), chequered(range(3), ["raises_in_forward", "raises_in_backward"])
)
def test_ranks_that_prefetch_from_the_host_get_the_error_too(ranks, depth, name):
    """Without poison, slots that a peer still copies stay in use for longer."""
    settings = ("offloaded", "full_shard", {"poison": False, "forward_prefetch": depth})
    for text in itertools.chain(*ranks(2)(one_rank_differs, name, *settings)):
        assert "ll ranks must make the same calls" in text, text


@pytest.mark.short(2)
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_ranks_that_ask_for_different_parameters_get_an_error(transport):
    """Each rank asks for a different full parameter."""
    run, model = sharded_run(**over(transport))
    params = [block.norm.weight for block in model.blocks]
    text = error_of(params[run.rank].full_tensor)
    assert text.startswith("EngineError: "), text
    assert "the whole of 'blocks.0.norm.weight'" in text or "'blocks.1.norm" in text, text


# ---- calls without messages are counted, and compared in the next backward -----------------------


def leaves_out(what, settings):
    run, model = sharded_run(**settings)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    whole = fs.full_state_dict(model, rank0_only=False)
    more = {
        "load": lambda: model.load_state_dict(whole),
        "freeze": lambda: model.blocks[0].norm.weight.requires_grad_(False),
        "write": lambda: torch._foreach_mul_([p.detach() for p in model.parameters()], 2),
    }

    def steps():
        for step in range(5):
            skips = what if (step, run.rank) == ODD else ""
            more.get(skips, lambda: None)()
            loss = run.loss(model, step)
            if skips not in ("backward", "both"):
                loss.backward()
            if skips == "assign":
                model.blocks[0].down.weight.grad = model.blocks[0].down.weight.grad * 3
            if what not in ("assign", "backward", "both") and skips != "clipping":
                fs.clip_grad_norm_(model, 1e-3)
            if skips == "torch":
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            if skips not in ("step", "both"):
                optimizer.step()
            if skips != "zero_grad":
                optimizer.zero_grad()

    return error_of(steps)


COUNTED = {
    "zero_grad": "gradients that were there before a backward",
    "load": "tensors in load_state_dict",
    "freeze": "changes of requires_grad",
    "write": "writes into parameters",
    "step": "optimizer steps",
    "backward": "optimizer steps",
    "both": "forwards that train",
}


@pytest.mark.parametrize(
    ("what", "settings"),
    [
        *chequered(list(COUNTED)[:4], [over(name) for name in TRANSPORTS], 4),
        ("step", {}),
        *((what, {"strategy": "no_shard"}) for what in ("step", "backward", "both")),
    ],
    ids=str,
)
def test_a_rank_that_skips_a_call_without_messages_is_named(ranks, what, settings):
    for text in ranks(2)(leaves_out, what, settings):
        wanted = f"EngineError: backward: expected as many {COUNTED[what]} on every rank"
        assert text.startswith(wanted)
        assert "rank 1 has made" in text


@pytest.mark.parametrize("what", ["backward", "both"])
def test_ranks_that_share_weights_do_not_wait_forever(ranks, what):
    for text in ranks(2)(leaves_out, what, {"transport": "shared"}):
        assert text.startswith("EngineError: ")
        assert "which this rank did not reach" in text


def has_another(number, settings):
    """Rank 1 uses a different number from the third step on."""
    run, model = sharded_run(transport="direct", **settings)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    states = optimizer.state.values

    def steps():
        for step in range(5):
            odd = 2.0 if step >= ODD[0] and run.rank == ODD[1] else 1.0
            run.loss(model, step).backward()
            if number == "lr":
                optimizer.param_groups[0]["lr"] = odd * 0.1
            elif number == "momentum that is lost":
                _ = odd == 1.0 or optimizer.state.clear()
            elif number == "momentum that is zeroed":
                _ = odd == 1.0 or [one["momentum_buffer"].zero_() for one in states()]
            elif number == "momentum that is loaded":
                _ = odd == 1.0 or optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            elif number == "scale":
                scaler.unscale_(optimizer)
                scaler.update(odd * 8.0)
            elif number == "max_norm":
                fs.clip_grad_norm_(model, odd * 1e-3)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), odd * 1e-3)
            optimizer.step()
            optimizer.zero_grad()

    return error_of(steps)


@pytest.mark.parametrize("number", ["lr", "max_norm", "max_norm of torch", "scale"])
def test_a_rank_that_updates_with_a_different_number_is_found(ranks, number):
    """In most units of four ranks, no parameter has elements on all ranks."""
    more = [(2, {}), (4, REPLICAS)] if number == "lr" else []
    for size, settings in [(4, {}), *more]:
        for text in ranks(size)(has_another, number, settings):
            assert text.startswith("EngineError: "), text
            assert "with the same numbers on every rank (lr, " in text


@pytest.mark.short(3)
@pytest.mark.parametrize(
    ("how", "size", "settings"),
    [
        *((how, 4, {}) for how in ("lost", "zeroed", "loaded")),
        ("lost", 2, {}),
        ("lost", 4, REPLICAS),
    ],
    ids=str,
)
def test_a_rank_whose_states_changed_alone_is_found(ranks, how, size, settings):
    """Includes parameters without elements on some ranks, which may skip empty shards."""
    for text in ranks(size)(has_another, f"momentum that is {how}", settings):
        assert "with the same numbers on every rank (lr, " in text, text


def edits_gradients(settings):
    """Only rank 1 drops its gradients, as after a bad loss of its batch.

    Momenta are clones of gradients with the same class; all ranks write into them.
    """
    run, model = sharded_run(**settings)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def steps():
        for step in range(4):
            run.loss(model, step).backward()
            for param in model.parameters() if (step, run.rank) == ODD else ():
                if param.grad is not None:
                    param.grad.mul_(0)
            optimizer.step()
            optimizer.zero_grad()

    return error_of(steps)


@pytest.mark.short(2)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_alone_writes_into_gradients_is_found(ranks, transport):
    for text in ranks(2)(edits_gradients, over(transport)):
        wanted = "EngineError: backward: expected as many writes into gradients on every rank"
        assert text.startswith(wanted), text
        assert "rank 1 has made" in text


def loads_apart(settings):
    run, model = sharded_run(**settings)
    whole = fs.full_state_dict(model, rank0_only=False)
    model.load_state_dict({name: value * (1 + run.rank // 2) for name, value in whole.items()})
    return error_of(lambda: run.loss(model, 0).backward())


@pytest.mark.short(2)
@pytest.mark.parametrize("settings", [{"transport": "direct"}, {"transport": "shared"}, REPLICAS])
def test_a_rank_that_loads_other_values_is_found(ranks, settings):
    for text in ranks(4)(loads_apart, settings):
        assert text.startswith("EngineError: "), text
        assert "same values on every rank" in text or settings is REPLICAS
    assert ranks(2)(loads_apart, settings if settings is not REPLICAS else {}) == [NO_ERROR] * 2


@pytest.mark.parametrize("settings", [{"grad_reduction": "sum"}, {"output_dtype": "bf16"}], ids=str)
@on_ranks(2)
def test_a_rank_with_another_setting_is_refused(settings):
    run = Run(2, dist.get_rank())
    text = error_of(lambda: run.shard(run.model(), **(settings if run.rank else {})) is None or 0)
    assert text.startswith("ConfigError: fs.shard: expected the same model and the same conf")


def averages_alone(asks, keeps, transport):
    """Only rank 0 updates an average, as under DDP: a second model, or clones of parameters."""
    run, model = sharded_run(**over(transport))
    average = dict(model.named_parameters())
    if keeps != "a model":
        average = {name: param.detach().clone() for name, param in average.items()}
    if keeps == "assigned clones":
        for name, param in model.named_parameters():
            average[name].data = average[name].data * 0.5 + param.data * 0.5
    if run.rank == 0:
        with torch.no_grad():
            for param in average.values():
                param.mul_(0.9)
    if keeps != "a model" and asks == "the whole of":
        return error_of(lambda: [average[name].full_tensor() for name in average])
    if keeps != "a model":
        model.load_state_dict(average, strict=False)
    if asks == "an evaluation":
        with torch.no_grad():
            return error_of(lambda: run.loss(model, 0))
    return error_of(lambda: fs.full_state_dict(model))


AVERAGES = itertools.product(
    ["an evaluation", "the whole of"], ["a model", "clones", "assigned clones"]
)


@pytest.mark.parametrize(("average", "transport"), chequered(AVERAGES, TRANSPORTS, 4), ids=str)
def test_an_average_of_one_rank_is_found_when_it_is_used(ranks, average, transport):
    asks, keeps = average
    copied = "tensors that were copied into parameters or gathered"
    wrote = "parameters" if keeps == "a model" else copied
    for text in ranks(2)(averages_alone, asks, keeps, transport):
        assert text.startswith(f"EngineError: {asks}"), text
        assert f"expected as many writes into {wrote} on every rank" in text


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
@on_ranks(2)
def test_a_rank_may_read_full_weights_alone_and_write_only_its_elements(strategy):
    """A correct program whose ranks call different functions of parameters raises no error."""
    run, model = sharded_run(transport="direct", strategy=strategy)
    weight = model.head.weight

    def steps():
        for step in range(3):
            if run.rank == 0 and strategy == "no_shard":  # one rank logs
                weight[0], weight.tolist(), torch.linalg.svdvals(weight), weight.detach().numpy()
            for param in model.parameters():  # some ranks may lack elements
                if param.numel():
                    param.detach().mul_(0.9)
            if model.blocks[0].norm.weight.numel():
                model.blocks[0].norm.weight.detach().clamp_(0)
            run.loss(model, step).backward()
            if weight.numel():
                weight.detach().clamp_(-1)
            with torch.no_grad():
                run.loss(model, step)

    assert error_of(steps) == NO_ERROR


def test_replicas_with_other_gradients_are_found_in_the_next_backward(ranks):
    for size, settings in ((2, {"strategy": "no_shard"}), (4, REPLICAS)):
        for text in ranks(size)(leaves_out, "assign", {"transport": "direct", **settings}):
            assert text.startswith("EngineError: backward: expected the same weights on all rep")


@pytest.mark.parametrize(("what", "transport"), chequered(["clipping", "torch"], TRANSPORTS))
def test_a_rank_that_clips_alone_or_not_is_found_before_it_gets_a_norm(ranks, what, transport):
    for text in ranks(2)(leaves_out, what, over(transport)):
        assert text.startswith("EngineError: "), text
        assert transport == "shared" or "a sum (a clipping)" in text, text


def written(which, clip, settings):
    """Returns the error of clipping after these ranks halved their gradients; checks the norm."""
    run, model = sharded_run(**settings)
    run.loss(model, 0).backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    for grad in grads if run.rank in which else []:
        grad.mul_(0.5)
    found = []
    text = error_of(lambda: found.append(clip(model)))
    if found and "strategy" not in settings:
        total = torch.stack([grad.to_local().square().sum() for grad in grads]).sum()
        dist.all_reduce(total)
        assert torch.allclose(found[0], total.sqrt())
    return text


def clips_nothing(model):
    return fs.clip_grad_norm_(model, 1e9)


def clips_nothing_by_torch(model):
    return nn.utils.clip_grad_norm_(model.parameters(), 1e9)


@pytest.mark.short(2)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_norm_is_right_or_refused_after_one_rank_wrote_into_its_gradients(ranks, transport):
    settings = over(transport)
    assert ranks(2)(written, (0,), clips_nothing, settings) == [NO_ERROR] * 2
    for text in ranks(2)(written, (0,), clips_nothing_by_torch, settings):
        assert text.startswith("EngineError: "), text


@pytest.mark.parametrize("clip", [clips_nothing, clips_nothing_by_torch])
def test_replicas_that_wrote_other_gradients_are_refused_when_they_clip(ranks, clip):
    for size, settings in ((2, {"strategy": "no_shard"}), (4, REPLICAS)):
        for text in ranks(size)(written, (0,), clip, settings):
            assert text.startswith("EngineError: "), text
            assert clip is clips_nothing_by_torch or "same gradients on all replicas" in text
    for which in (range(4), (0, 2)) if clip is clips_nothing else ():  # both replicas of a part
        assert ranks(4)(written, which, clip, REPLICAS) == [NO_ERROR] * 4
    assert ranks(2)(written, (0, 1), clip, {"strategy": "no_shard"}) == [NO_ERROR] * 2


class Repeating(nn.Module):
    """Calls blocks as often as a batch says, and the first block once more at the end.

    The last block may be larger.
    """

    def __init__(self, width=6):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.blocks.append(nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 6)))
        self.head = nn.Linear(6, 6)

    def forward(self, x, times):
        for block, number in zip([*self.blocks, self.blocks[0]], times, strict=False):
            for _ in range(number):
                x = x + block(x)
        return self.head(x)


def repeats(transport, times, width=6, evaluates=False, prefetch=0):
    """Ranks call units as often as `times` says; `native` compares late, as c10d over NCCL."""
    torch.manual_seed(0)
    model = Repeating(width).double()
    options = {"forward_prefetch": prefetch, "backward_prefetch": prefetch}
    options |= REPLICAS if len(times) == 4 else {}
    options |= over(transport.replace("native", "c10d"))
    with mock.patch.object(groups, "is_gloo", return_value=transport != "native"):
        fs.shard(model, wrap=["Sequential"], poison=True, **options)
    x = torch.ones(2, 6, dtype=torch.float64)
    mine = times[torch.distributed.get_rank()]

    def steps():
        for step in range(3):
            with torch.set_grad_enabled(not evaluates or step < 2):
                loss = model(x, mine if step == 2 else (1, 1, 1, 1)).square().mean()
            if loss.requires_grad:
                loss.backward()

    return error_of(steps)


LATE = "expected every rank to call the same units in the same order"
AT_ONCE = ", a gather of blocks."
SAID = [("direct", AT_ONCE), ("c10d", AT_ONCE), ("offloaded", AT_ONCE), ("native", LATE)]


ONE, OTHER = (2, 1, 1, 1), (1, 1, 2, 1)


@pytest.mark.parametrize(("meets", "evaluates"), chequered(SAID, [False, True]))
def test_ranks_that_call_different_units_get_the_error_before_results(ranks, meets, evaluates):
    transport, said = meets
    for text in ranks(2)(repeats, transport, [ONE, OTHER], 6, evaluates):
        assert text.startswith("EngineError: "), text
        assert said in text


@pytest.mark.short(2)
@pytest.mark.parametrize("transport", ["native", "offloaded", "direct", "c10d"])
def test_ranks_that_call_the_same_units_or_share_weights_get_no_error(ranks, transport):
    assert ranks(2)(repeats, transport, [OTHER, OTHER], 6, False, 1) == [NO_ERROR] * 2
    assert ranks(2)(repeats, "shared", [ONE, OTHER]) == [NO_ERROR] * 2
    assert ranks(4)(repeats, transport, [ONE, ONE, OTHER, OTHER]) == [NO_ERROR] * 4


@pytest.mark.parametrize(
    ("transport", "evaluates"), chequered(["c10d", "direct", "offloaded"], [False, True])
)
def test_units_of_different_sizes_crash_no_process(ranks, transport, evaluates):
    for times in ([ONE, (1, 1, 1, 2)], [(1, 1, 1, 2), ONE]):
        for text in ranks(2)(repeats, transport, times, 300, evaluates):
            assert AT_ONCE in text, text


@pytest.mark.parametrize("transport", ["c10d", "direct", "offloaded"])
def test_a_gather_of_one_rank_during_another_ranks_backward_is_an_error(ranks, transport):
    texts = ranks(2)(repeats, transport, [(1, 1, 1, 1, 1), (1, 1, 1, 1)], timeout=20)
    gather = "a gather of blocks.0" + r" \(number \d+\)" * (transport == "offloaded")
    assert re.search(f"{gather}: expected every rank to come here; rank 1 is at a backw", texts[0])
    assert texts[1].startswith("EngineError: a backward")
    assert "expected every rank to come here; rank 0 is at a forward" in texts[1]


@pytest.mark.short(1)
@pytest.mark.parametrize(("transport", "said"), SAID)
def test_ranks_of_one_replica_must_call_the_same_units(ranks, transport, said):
    evaluated = [] if transport == "native" else [([ONE, OTHER, ONE, OTHER], 6, True)]
    for given in (([ONE, OTHER, ONE, OTHER],), ([ONE, OTHER, OTHER, ONE],), *evaluated):
        for text in ranks(4)(repeats, transport, *given):
            assert text.startswith("EngineError: "), text
            assert said in text


def waits_alone():
    group = torch.distributed.new_group(timeout=timedelta(seconds=1))
    axes = Axes.of(Mesh(1, 2), torch.distributed.get_rank(), gather_group=group)
    transport = C10dTransport(axes, ReductionKind.NATIVE)
    transport.phase.next = "a forward of the model"
    text = error_of(transport.fetch([torch.zeros(128)]).wait) if axes.rank == 0 else ""
    torch.distributed.barrier()
    return text


def test_a_rank_that_waits_alone_over_c10d_gets_a_typed_error(ranks):
    text = ranks(2)(waits_alone)[0]
    assert text.startswith("HangError: a forward of the model: expected a message from every rank")


# ---- all ranks raise, in different units ---------------------------------------------------------


def around(model, waits):
    return fs.no_sync(model, outer_only=True) if waits else contextlib.nullcontext()


def weights_after(settings, waits, *, is_tried):
    """Returns weights after steps, in two of which each rank raises in a different unit."""
    rank, sizes, raises = dist.get_rank(), (6, 40, 16, 72, 24, 4), [False]
    torch.manual_seed(0)
    model = nn.Sequential(*itertools.starmap(nn.Linear, itertools.pairwise(sizes)))
    fs.shard(model, wrap="Linear", **settings)
    optimizer = optim.AdamW(model.parameters())
    model[rank].register_forward_hook(lambda *args: Raising.apply(args[-1], lambda: raises[0]))
    for step in range(6):
        x = torch.randn(3, sizes[0], generator=generator_of(step, rank))
        raises[0] = step in (1, 3)
        if not raises[0]:
            model(x).square().sum().backward()
            optimizer.step()
        elif is_tried:
            with pytest.raises(Mine), around(model, waits[0]):
                model(x).square().sum().backward()
            for other in waits[1:]:
                with around(model, other):
                    model(x)
        optimizer.zero_grad()
    return nn.utils.parameters_to_vector(fs.full_state_dict(model, rank0_only=False).values())


@pytest.mark.short(5)
@pytest.mark.parametrize(
    ("world_size", "settings", "waits"),
    [
        *((2, over(transport), [False]) for transport in TRANSPORTS),
        *(
            (4, {"transport": transport, **REPLICAS}, waits)
            for transport in ("direct", "c10d")
            for waits in ([False, True], [True, False])
        ),
        *(
            (2, {**over(transport), "strategy": "shard_grad_op"}, [False])
            for transport in TRANSPORTS
        ),
    ],
    ids=str,
)
@on_ranks("world_size")
def test_ranks_may_raise_in_different_units_of_one_backward(settings, waits):
    """Covers sums over replicas that wait in the backward that raises, and in a later forward."""
    found, wanted = (weights_after(settings, waits, is_tried=tried) for tried in (True, False))
    assert torch.equal(found, wanted)
