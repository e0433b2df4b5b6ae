"""Whole-matrix optimizers on shards, with an owner per parameter: fs.owned.

[Note: owners]
Muon, Adafactor and 8-bit states need full tensors. The plan assigns each sharded parameter an owner
in its shard group. There an unmodified optimizer sees only full tensors and keeps their states. A
step runs in rounds (planner/optimizers.py):

    rank 0   slice of p | slice of p.grad  --.             .-->  updated slice
    rank 1   slice of p | slice of p.grad  ---> p, p.grad  --->  updated slice
                                             (rank 1 owns p)

Replicas of the owner do the same with the same gradients. Every rank steps unsharded parameters in
place. Between steps the full parameters need no memory.

If a parameter is also cut over other axes (engine/cuts.py), each rank of these axes has an owner of
its part. These owners gather the whole from each other and make the same update, so that each keeps
its part of it, and whole states.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fullshard.engine._torch_compat import no_guard
from fullshard.engine.cuts import Cut
from fullshard.engine.engine import Engine, engine_of
from fullshard.engine.norms import Count, is_at_hand
from fullshard.engine.optimizers import WATCHED, check_by_itself
from fullshard.engine.parameter import Guarded, ShardedParameter
from fullshard.engine.unit import Member
from fullshard.errors import CheckpointError, EngineError
from fullshard.planner.layout import clean_name
from fullshard.planner.mesh import Mesh
from fullshard.planner.optimizers import Owners
from fullshard.planner.units import Place
from fullshard.transport.groups import Exchange

_SAVES = (
    "fs.save(folder, model, optimizer) and fs.load, since each rank has the states of some tensors"
)
Groups = list[dict[str, Any]]
Factory = Callable[[Groups], Optimizer]


@dataclass(eq=False)
class _Owned:
    """A sharded parameter and its full parameter.

    Attributes:
        param: The user's parameter, a shard.
        whole: The full parameter of the owner's optimizer; it has no memory between steps.
        exchange: Exchanges slices of its unit's ranks.
        shape: Shape without sharding, but cut over other axes.
        cut: The cut over other axes.
        holders: (part, start, stop) of every rank with elements; None if it is not sharded.
        owner: Part that owns the parameter; -1 if every rank does.
    """

    param: nn.Parameter
    whole: nn.Parameter
    exchange: Exchange
    shape: tuple[int, ...]
    cut: Cut | None = None
    holders: Sequence[tuple[int, int, int]] | None = None
    owner: int = -1

    @classmethod
    def of(cls, param: nn.Parameter, exchange: Exchange, member: Member | None = None) -> _Owned:
        shape = tuple(param.shape) if member is None else member.piece.shape
        cut = None if member is None else member.cut
        with no_guard():
            none = _without_memory(torch.Size(cut.shape if cut else shape), param)
            made = cls(param, nn.Parameter(none), exchange, shape, cut)
        if member is not None and member.param.record.is_cut:
            made.holders = member.param.record.holders
        return made

    @property
    def is_here(self) -> bool:
        """Whether this rank owns the parameter."""
        return self.owner in (-1, self.exchange.part)

    def slices(self) -> list[torch.Tensor]:
        """(n_local,) plain elements of parameter and gradient; the tensors if it is ignored."""
        assert self.param.grad is not None
        both = [self.param.detach(), self.param.grad.detach()]
        if not isinstance(self.param, ShardedParameter):
            return both
        with no_guard():
            return [x.as_subclass(torch.Tensor).reshape(-1) for x in both]

    def show(self, both: Sequence[torch.Tensor]) -> None:
        """Set (numel,) elements as parameter and gradient."""
        self.whole.grad = None  # of another shape
        self.whole.data, self.whole.grad = (x.view(self.shape) for x in both)

    def join(self) -> None:
        """Gather parameter and gradient over other axes. A collective of these."""
        if self.cut is not None:
            both: Any = self.whole.detach(), self.whole.grad
            value, grad = map(self.cut.whole_of, both)
            self.whole.grad = None
            self.whole.data, self.whole.grad = value, grad

    def part(self) -> None:
        """Leave this rank's part of the updated parameter on other axes."""
        if self.cut is not None:
            self.whole.grad, self.whole.data = None, self.cut.local_of(self.whole.detach())

    def hide(self) -> None:
        self.whole.grad = None
        shape = self.cut.shape if self.cut else self.shape
        self.whole.data = _without_memory(torch.Size(shape), self.whole)


def _without_memory(shape: torch.Size, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(shape)


class OwnedOptimizer(Optimizer):
    """An optimizer whose groups contain the user's shards, and whose states are with the owners.

    `state` contains the full states of the tensors that this rank owns. fs.save and fs.load support
    it on any number of ranks. See [Note: owners].

    Args:
        model: A sharded model.
        factory: Creates the optimizer for groups of full parameters.
        groups: Groups of the model's parameters.
        beside: An optimizer that steps the shards of other parameters.
    """

    def __init__(
        self, model: nn.Module, factory: Factory, groups: Groups, beside: Optimizer | None = None
    ) -> None:
        self._model, self._engine, self._beside = model, engine_of(model), beside
        engine = self._engine
        _refuse_places(engine)
        self._rounds = _rounds_of(engine, [p for group in groups for p in group["params"]])
        self._owned = {id(o.param): o for members in self._rounds for o in members}
        like = next((owned.whole for owned in self._owned.values()), torch.zeros(0))
        engine.agree(lambda: check_by_itself(factory, groups, like))
        wholes = [[self._owned[id(p)].whole for p in g["params"] if self.owns(p)] for g in groups]
        mine = [{**g, "params": found} for g, found in zip(groups, wholes, strict=True)]
        self._inner = engine.agree(lambda: factory(mine))
        both = zip(groups, self._inner.param_groups, strict=True)
        settings = [{**theirs, "params": ours["params"]} for ours, theirs in both]
        self._complete = False
        super().__init__(settings, self._inner.defaults)
        self.kind = f"owned {type(self._inner).__name__}"
        if beside is not None:
            self._join(beside)
        self._complete = True
        self._made_with = _lists(self.param_groups)
        WATCHED.trusted.add(self)
        self._take_states(self._owned.values())

    def _join(self, beside: Optimizer) -> None:
        """Make both optimizers share one list of groups and one table of states."""
        if isinstance(beside, OwnedOptimizer):
            raise EngineError(
                "fs.owned: expected an elementwise optimizer in `beside`; got another owned one, "
                "whose states would not be saved. Use two separate optimizers."
            )
        ours = {id(param) for group in self.param_groups for param in group["params"]}
        both = [p for g in beside.param_groups for p in g["params"] if id(p) in ours]
        if both:
            raise EngineError(
                f"fs.owned: expected other parameters in `beside`; {name_of(both[0])} is in both. "
                "Give each parameter one optimizer."
            )
        self.param_groups += beside.param_groups
        self.state.update(beside.state)
        beside.state = self.state
        self.kind += f", {type(beside).__name__}"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises an error after construction: owners are chosen for all parameters together."""
        if self._complete:
            raise EngineError("fs.owned: expected no new group; got one. Create it again.")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Raises an error: a rank has only the states of the tensors that it owns."""
        raise CheckpointError(f"fs.owned: expected {_SAVES}; got state_dict.")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # noqa: ARG002 torch's
        """Raises an error: a rank's dict would have only the tensors that it owns."""
        raise CheckpointError(f"fs.owned: expected {_SAVES}; got load_state_dict.")

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have gradients. A collective."""
        if closure is not None:
            raise EngineError("fs.owned: expected step() without a closure; got one.")
        self._check()
        for ours, theirs in zip(self.param_groups, self._inner.param_groups, strict=False):
            theirs.update({key: value for key, value in ours.items() if key != "params"})
        self._engine.home.before_write()
        for members in self._rounds:
            self._step(members)
        if self._beside is not None:
            self._beside.step()

    def _step(self, members: list[_Owned]) -> None:
        """Run one round: slices to owners, their optimizer, slices back."""
        live = [owned for owned in members if owned.param.grad is not None]
        mine = [owned for owned in live if owned.is_here]
        try:
            for owned in mine:
                both = owned.slices()
                if owned.holders is not None:
                    both = [own.new_empty(math.prod(owned.shape)) for own in both]
                owned.show(both)
            self._give_states(mine)
            self._move(live, to_owners=True)
            for owned in mine:
                owned.join()
            error = self._outcome(partial(self._update, mine))
            for owned in mine:
                owned.part()
            self._move(live, to_owners=False)  # also after an error: the other ranks wait there
        finally:
            for owned in mine:
                owned.hide()
        torch.autograd.graph.increment_version([owned.param for owned in live])  # of older graphs
        if error is not None:
            raise error
        self._take_states(members)

    def _move(self, live: list[_Owned], *, to_owners: bool) -> None:
        """Copy slices of parameters and gradients to owners, or updated parameters back."""
        slices: list[tuple[int, torch.Tensor]] = []
        ranges: list[tuple[int, torch.Tensor]] = []  # full tensors that this rank owns
        for owned in live:
            own = owned.slices() if to_owners else owned.slices()[:1]
            if not owned.is_here:
                slices += [(owned.owner, local) for local in own]
                continue
            whole: Any = owned.whole
            if owned.holders is None:  # updated in place, unless the optimizer made a new tensor
                if whole.data_ptr() != own[0].data_ptr():
                    own[0].copy_(whole.detach().view(own[0].shape))
                continue
            flat = [x.detach().reshape(-1) for x in ([whole, whole.grad] if to_owners else [whole])]
            for holder, start, stop in owned.holders:
                there = [x[start:stop] for x in flat]
                if holder != owned.exchange.part:
                    ranges += [(holder, x) for x in there]
                    continue
                for x, local in zip(there, own, strict=True):
                    (x if to_owners else local).copy_(local if to_owners else x)
        if live:
            live[0].exchange.run(*((slices, ranges) if to_owners else (ranges, slices)))

    def _update(self, mine: list[_Owned]) -> None:
        """Step the owners' optimizer on full tensors. Not a collective."""
        before = settings_of(self._inner)
        if mine:
            self._inner.step()
        if settings_of(self._inner) != before:
            raise EngineError(
                f"fs.owned: expected {type(self._inner).__name__} to keep its state per parameter; "
                "it changed its groups or attributes, and fs.owned calls its step several times "
                "per step. Use it under no_shard, without fs.owned."
            )

    def _check(self) -> None:
        """Check that shards and gradients match the choice of owners, on all ranks."""
        engine = self._engine
        if engine_of(self._model) is not engine:
            raise EngineError(
                "fs.owned: expected the model as it was sharded; it was sharded again since. "
                "Create this again, and load its states from a checkpoint."
            )
        engine.check_params()
        if (error := self._outcome(self._check_edits)) is not None:
            raise error
        code = zlib.crc32(bytes(o.param.grad is not None for o in self._owned.values()))
        engine.norms.compare("fs.owned", {Count.OWNED: code})

    def _outcome(self, act: Callable[[], None]) -> Exception | None:
        """Raise any rank's error, or return this rank's if the host may not wait for a device."""
        if is_at_hand(self._engine.device):
            self._engine.agree(act)
            return None
        try:
            act()
        except Exception as error:  # noqa: BLE001  the caller raises it
            return error
        return None

    def _check_edits(self) -> None:
        """Check that groups and parameters are those for which owners were chosen."""
        beside = [] if self._beside is None else _lists(self._beside.param_groups)
        made_with, num_own = self._made_with, len(self._made_with) - len(beside)
        if _lists(self.param_groups) != made_with or beside != made_with[num_own:]:
            raise EngineError(
                "fs.owned: expected the groups that it was made with, in which only numbers may "
                "change; groups or parameters were added, removed or moved. Create it again."
            )
        for param in (param for group in self.param_groups[:num_own] for param in group["params"]):
            if param.grad is not None and id(param) not in self._owned:
                raise EngineError(
                    f"fs.owned: expected {name_of(param)} without a gradient, because it was "
                    "frozen when this was created. Create it again."
                )

    # ---- states

    def whole_of(self, param: nn.Parameter) -> nn.Parameter | None:
        """The full parameter that its optimizer steps for a shard; None for other tensors."""
        found = self._owned.get(id(param))
        return found and found.whole

    def owns(self, param: Any) -> bool | None:
        """Whether this rank has a parameter's full states; None if each rank has a slice."""
        owned = self._owned.get(id(param))
        return None if owned is None else owned.is_here

    def _give_states(self, members: Iterable[_Owned]) -> None:
        """Copy states, which may have been loaded or cleared, to the owner's optimizer."""
        for owned in members:
            found = self.state.get(owned.param, {})
            own = {key: value for key, value in found.items() if not isinstance(value, Guarded)}
            self._inner.state.pop(owned.whole, None)
            if own:
                self._inner.state[owned.whole] = own

    def _take_states(self, members: Iterable[_Owned]) -> None:
        """Copy the states of the owner's optimizer to `state`."""
        for owned in members:
            if owned.whole in self._inner.state:
                self.state[owned.param].update(self._inner.state[owned.whole])


def owns_states(optimizer: Optimizer, param: Any) -> bool | None:
    """Whether this rank has a parameter's full states; None if each rank has a slice."""
    return optimizer.owns(param) if isinstance(optimizer, OwnedOptimizer) else None


def owned(
    model: nn.Module,
    factory: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    params: Iterable[Any] | None = None,
    *,
    beside: torch.optim.Optimizer | None = None,
) -> torch.optim.Optimizer:
    """An optimizer that needs whole tensors (Muon, Adafactor, 8-bit states), on shards.

    Each sharded parameter has one owner among the ranks. The owner gathers it, runs the unmodified
    optimizer on the whole tensor, keeps its states, and returns the slices to the other ranks.
    fs.save and fs.load support any number of ranks. A collective: all ranks call it and its step.

    Args:
        model: A sharded model.
        factory: Makes the optimizer for parameter groups: `partial(torch.optim.Muon, lr=0.02)`.
        params: Parameters of the model or groups of them; None: all trained ones that are not in
            `beside`.
        beside: An elementwise optimizer that steps the shards of other parameters. The result has
            its groups and states too, and calls its step.

    Raises:
        EngineError: The optimizer combines several tensors, or offload moves its states.
    """
    if params is None:
        taken = {id(p) for g in (beside.param_groups if beside else ()) for p in g["params"]}
        params = [p for p in model.parameters() if p.requires_grad and id(p) not in taken]
    given = [p[1] if isinstance(p, tuple) else p for p in params]  # named_parameters()
    if not given:
        raise EngineError("fs.owned: expected parameters to train; got none.")
    groups = given if isinstance(given[0], dict) else [{"params": given}]
    groups = [{**group, "params": list(group["params"])} for group in groups]
    known = {id(param) for param in model.parameters()}
    for param in (param for group in groups for param in group["params"]):
        if id(param) not in known:
            raise EngineError(
                f"fs.owned: expected parameters of the model; got {name_of(param)}, which is not "
                "among them. Pass parameters of model.named_parameters()."
            )
    return OwnedOptimizer(model, factory, groups, beside)


def _rounds_of(engine: Engine, params: list[nn.Parameter]) -> list[list[_Owned]]:
    """Trained parameters, grouped into rounds: cut ones by mesh first, then the rest."""
    meshes = dict.fromkeys([engine.plan.mesh, *(unit.plan.mesh for unit in engine.units)])
    exchanges = {mesh: Exchange.over(mesh, engine.rank) for mesh in meshes}
    members = {id(member.param): member for member in engine.members}
    # not the order of elements: it depends on sizes, which ranks of other axes may have otherwise
    turn = {of: (m.group.unit.plan.index, m.piece.name) for of, m in members.items()}
    params = sorted(params, key=lambda param: turn.get(id(param), (len(engine.units), "")))
    cut, rest = dict[Mesh, list[_Owned]](), list[_Owned]()
    for param in params:
        member = members.get(id(param))
        if not param.requires_grad or (member is not None and member.grad is None):
            continue  # frozen
        mesh = engine.plan.mesh if member is None else member.group.unit.plan.mesh
        owned = _Owned.of(param, exchanges[mesh], member)
        (rest if owned.holders is None else cut.setdefault(mesh, [])).append(owned)
    rounds: list[list[_Owned]] = []
    for mesh, sharded in cut.items():
        chosen = Owners.choose([owned.whole.numel() for owned in sharded], mesh.shard)
        for owned, owner in zip(sharded, chosen.of, strict=True):
            owned.owner = owner
        rounds += [[sharded[index] for index in indices] for indices in chosen.rounds]
    return [*rounds, rest] if rest else rounds


def _refuse_places(engine: Engine) -> None:
    """Raise an error for places of state that are not supported yet."""
    homes, mesh = engine.plan.homes, engine.plan.mesh
    elsewhere = homes.offloads and engine.device.type != "cpu"
    if elsewhere or Place.DISK in (homes.parameters, homes.gradients, homes.optimizer):
        raise EngineError(
            f"fs.owned: expected parameters, gradients and states on {engine.device}; offload "
            "stores them elsewhere, which is not yet supported. Leave it out."
        )
    if engine.transport.name == "fake" and mesh.shard > 1:
        raise EngineError("fs.owned: expected a transport with real ranks; got fake.")


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The numeric settings of an optimizer and its groups, without flags."""

    def plain(value: Any) -> Any:
        return value.tolist() if isinstance(value, torch.Tensor) else value

    own = {k: v for k, v in vars(optimizer).items() if type(v) in (int, float) and k[0] != "_"}
    groups = optimizer.param_groups
    return [own, *({k: plain(v) for k, v in g.items() if k != "params"} for g in groups)]


def name_of(param: Any) -> str:
    """The name of a parameter in errors."""
    record = getattr(param, "record", None)
    if record is None:
        return f"one of shape {tuple(param.shape)}"
    return repr(clean_name(record.piece.name))


def _lists(groups: Groups) -> list[tuple[int, list[int]]]:
    """The identity of each group and of its parameters."""
    return [(id(group), [id(param) for param in group["params"]]) for group in groups]
