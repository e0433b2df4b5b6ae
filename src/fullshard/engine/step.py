"""From hooks to events: hooks call the scheduler, and `Actions` carries out its events.

    hook on a unit's module         call to the scheduler       done here
    forward pre-hook                enter_forward               gathers, swap in
    forward hook (always called)    leave_forward               swap out, watch outputs, release
    gradient of a watched output    enter_backward              gathers, swap in
    gradient of a compute param     complete (after the last)   reductions, in plan order
    end of backward                 end_backward                the rest, `p.grad`, release

[Note: watched outputs]
A unit's backward begins when the gradient of a tensor that the unit computed arrives. The runtime
watches the unit's outputs, the outputs of every inner module with parameters (where a router loss
or a hidden-state loss leaves the unit), and tensors that modules keep as attributes
(engine/attributes.py). It does not watch a tensor that a unit only passes through. Such a tensor
has an autograd node with a lower number than the unit's first, and its gradient becomes final when
the slot contains another unit (law 5).

Compiled code is one autograd node that all its outputs share, so watching the unit's outputs is
enough, and hooks on inner modules would split the graph. If a unit runs as several graphs, a tensor
that leaves it between them, other than by an attribute, is not watched. If its gradient arrives
first, the slot contains another unit, and an error is raised.

[Note: copied outputs]
An output or an attribute may share memory with the unit's weights: a slice of a table, or a
parameter itself. The slot will be reused for another unit, and on a shared home other ranks write
to it after their forward. The runtime therefore returns a copy, which passes gradients on. An
attribute is restored when the unit is entered again. Writing into the copy raises an error at the
next step, because in one process it would modify the parameter.
Closures, partial functions and bound methods are changed alike. Iterators cannot be changed and
raise an error.

[Note: recompute]
Forward code that runs inside its model's backward recomputes activations, or belongs to a hook. It
gathers on demand, keeps the gathered units, and does not prefetch. The unit's hooks may be outside
the recomputed code, so modules also see the compute parameters from pre-backward to the end of it.
Any other forward in a backward begins a step: a teacher's, one in a post-accumulate hook, or the
recompute of a model whose own backward has not begun (a checkpoint around several).

[Note: a backward inside a backward]
A hook may call `torch.autograd.grad`, as implicit layers do. Autograd finishes this inner backward
before it continues the outer one. The inner backward gathers on demand and must not reach
parameters, which is an error; it therefore needs no state and does not change the outer's. The
outer backward is alive while autograd holds the callback for its end. If the backward raises,
autograd drops the callback, and the modules show the user's parameters again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from threading import get_ident
from time import perf_counter
from typing import Any
from weakref import WeakSet, ref

import torch

from fullshard.engine._torch_compat import (
    NodeHook,
    current_node,
    enable_gradients,
    graph_task_id,
    has_modes,
    is_profiling,
    is_transforming,
    keeps_graph,
    next_sequence_number,
    no_guard,
    outside_modes,
    queue_callback,
    uncompiled,
    unwrapped,
)
from fullshard.engine.attributes import ModuleTensors, Undo, change_tensors, put_back, tensors_in
from fullshard.engine.computed import Released
from fullshard.engine.gradients import REENTRANT, Gradients, check_graph
from fullshard.engine.norms import Count
from fullshard.engine.parameter import Guarded
from fullshard.engine.record import check_fresh
from fullshard.engine.unit import Member, Unit, alive, is_reached
from fullshard.errors import EngineError, HangError, SlotError
from fullshard.planner.schedule import Event, EventKind, Recorder, Scheduler, Sync


@dataclass(eq=False, slots=True, weakref_slot=True)
class Use:
    """A forward of a unit whose tensors are watched for gradients.

    Attributes:
        runtime: The model's runtime; see `alive`.
        unit: Index of the unit.
        around: The use of the enclosing unit; its backward begins first.
        generation: The forward of the whole model that the use belongs to.
        first_node: Number of the first autograd node created in the forward.
        thread: The thread of the forward; autograd numbers the nodes of each thread anew.
        task: Id of the backward that has entered the use, or that it was made in; -1 before.
        retained: Whether that backward kept its graph.
        num_views: Number of tensors in its slots before it; None if it makes a graph.
    """

    runtime: ref[Runtime]
    unit: int
    around: Use | None
    generation: int
    first_node: int = field(default_factory=next_sequence_number)
    thread: int = field(default_factory=get_ident)
    task: int = -1
    retained: bool = False
    num_views: int | None = None

    @uncompiled
    def enter(self, _: Any) -> None:
        """Begin its backward: a hook of autograd nodes."""
        alive(self.runtime, "backward")._enter_backward(self)


@dataclass
class Observed:
    """The order in which the first step entered its units. Ranks compare it once.

    Attributes:
        generation: The forward whose order is recorded, together with the order of its backward.
    """

    generation: int = -1
    forward: list[int] = field(default_factory=list[int])
    backward: list[int] = field(default_factory=list[int])
    done: bool = False


class Runtime:
    """Runs one model's plan on this rank.

    Args:
        units: The model's units in plan order, bound to their slots.
        scheduler: Returns the events of each hook.
        gradients: Collects, reduces and shows gradients.
        recorder: Records every event.
        poison: Fill released slots with NaN.
        actions: Constructor of the object that carries out events; None: `Actions`.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        scheduler: Scheduler,
        gradients: Gradients,
        recorder: Recorder,
        *,
        poison: bool,
        actions: Callable[..., Actions] | None = None,
    ) -> None:
        self.units = list(units)
        self.scheduler = scheduler
        self.gradients = gradients
        self.actions = (actions or Actions)(self.units, gradients, recorder, poison=poison)
        self.step = 0
        self.observed = Observed()
        self.agreed = False  # whether ranks have agreed on the order
        self.before_step: Callable[[], None] = lambda: None
        self.agree_on_frozen: Callable[[], None] = lambda: None  # in the first backward
        self.attributes: Sequence[ModuleTensors] = ()  # by unit
        self.stack: list[Use] = []  # running forwards
        self._current: list[Use | None] = [None] * len(self.units)
        self._kept: list[Use | None] = []  # the current ones before forwards inside backward
        self._node_hooks = [NodeHook() for _ in self.units]  # of outputs of their inner modules
        self._opened: set[Unit] = set()  # units that the running backward has entered
        self.cut_anew: str | None = None  # a trained parameter that a later engine cut differently
        self._task = -1  # the running backward
        self._end: Callable[[], Any] = _nothing  # weak: its callback, while autograd has it
        self._nested = -1  # the backward inside it
        self._outer = -1  # the running backward in which a forward began a step
        self._outer_end: Callable[[], Any] = _nothing  # weak: its callback; None if it raised
        self._generation = 0  # forwards of the whole model so far
        self.num_followed = 0  # writes into shards, of `home.num_writes`, that units have followed
        self._replaced: dict[int, Undo] = {}  # attributes with copies of weights, by unit
        self._copies: list[tuple[torch.Tensor, int, str]] = []  # copies returned in the last step
        # Of live graphs; outermost ones alone once ranks agree on an order, which replaces slots.
        self._uses: WeakSet[Use] = WeakSet()
        self._retains = False  # the running backward keeps its graph
        # Whether live graphs may share torch.autocast's casts of weights. Gradients come through a
        # cast when all of them are summed, late for the later graph, and were computed from copies.
        self._shares_casts = False
        gradients.finish_reading = self._finish_reading

    # ---- forward

    def is_in_backward(self) -> bool:
        """Whether forward code belongs to this model's backward. See [Note: recompute]."""
        return self._task != -1 and graph_task_id() != -1 and self._end() is not None

    def enter(self, index: int, *, is_outermost: bool) -> None:
        """Pre-forward of a unit's module.

        Args:
            index: Index of the unit.
            is_outermost: Whether this forward begins a step.
        """
        unit = self.units[index]
        unit.check_params()
        if index in self._replaced:
            put_back(self._replaced.pop(index))
        if self.is_in_backward():
            check_fresh(unit, self.gradients.home, self.num_followed)
            self._run(self.scheduler.enter_recompute(index))
            unit.wait()
            unit.versions.mark(is_open=True)
            unit.swap_in()
            self._kept.append(self._current[index])
            task = graph_task_id()  # which never computes what it makes
            self._current[index] = Use(ref(self), index, None, self._generation, task=task)
            return
        if is_outermost:
            num_writes = self.gradients.home.num_writes
            self._begin_step(index, stale=num_writes != self.num_followed)
            self.num_followed = num_writes
        else:
            self.follow_writes()
            unit.check_frozen()
        use = Use(ref(self), index, self.stack[-1] if self.stack else None, self._generation)
        self._node_hooks[index].call(partial(_enter_after_hooks, use))
        events = self.scheduler.enter_forward(index)
        try:
            self._run(events)
        except (EngineError, HangError):
            self.reset()  # the hooks of outer units must gather no more
            raise
        self.stack.append(use)
        self._current[index] = use
        use.num_views = None if torch.is_grad_enabled() else unit.num_views()
        unit.swap_in()
        if not self.observed.done and use.generation == self.observed.generation:
            self.observed.forward.append(index)

    def leave(self, index: int, output: Any) -> Any:
        """Post-forward, also of one that raised. Returns the output; copies views of weights."""
        unit = self.units[index]
        if unit.swapped == 0:
            return output
        unit.swap_out()
        values = self.attributes[index].values() if self.attributes else None
        in_attributes = tensors_in(values) if values else []
        tensors = [output] if type(output) is torch.Tensor else tensors_in(output)
        if any(map(unit.shares_memory, chain(tensors, in_attributes))):
            copied, title = self._copied(unit), unit.plan.title
            output = change_tensors(output, copied, title)
            self._replaced[index] = self.attributes[index].change(copied, title)
            tensors, in_attributes = tensors_in(output), tensors_in(self.attributes[index].values())
        if self.is_in_backward():
            self.watch(index, chain(tensors, in_attributes), is_inner=False)
            self._current[index] = self._kept.pop()
            self.scheduler.leave_recompute(index)
            return output
        use = self._current[index]
        if use is None or use not in self.stack:
            return output
        del self.stack[self.stack.index(use) :]
        searches = use.num_views is not None or unit.has_kept_views or not self.agreed
        if searches and unit.gathered:
            unit.find_views(self.units, use.num_views)
        keeps = torch.is_grad_enabled()
        training = keeps and self.watch(index, chain(tensors, in_attributes), is_inner=False)
        if training and not (self.stack and self.agreed):
            self._uses.add(use)
        try:
            unit.check_writes()
        finally:
            self._run(self.scheduler.leave_forward(index, training=training, keeps=keeps))
            _begin_last_gather(self)
            if not training and not self.stack:
                self._finish_reading(settled=False)
                if index == 0 and not keeps:
                    self._compare_gathers()
        return output

    def _compare_gathers(self) -> None:
        """Check that ranks but replicas evaluate the same units and weights. A collective."""
        norms, compared = self.gradients.norms, (Count.GATHERS, Count.WRITES, Count.SOURCES)
        if (mesh := norms.transport.axes.mesh).replicate == 1 and mesh.shard > 1:
            with outside_modes():
                norms.compare("an evaluation", {it: norms.counts[it] for it in compared})

    def _copied(self, unit: Unit) -> Callable[[torch.Tensor], torch.Tensor]:
        """Copies tensors that share memory with the unit's weights. See [Note: copied outputs]."""

        def change(tensor: torch.Tensor) -> torch.Tensor:
            if not unit.shares_memory(tensor):
                return tensor
            copy = tensor.clone()
            if not copy.is_inference():  # inference tensors have no version
                self._copies.append((copy, copy._version, unit.plan.title))
            return copy

        return change

    def _check_copies(self) -> None:
        """Check that copies of outputs were not written.

        Raises:
            EngineError: A copy was written.
        """
        copies, self._copies = self._copies, []
        for copy, version, title in copies:
            if copy._version != version:
                raise EngineError(
                    f"{title}: expected no writes into a view of a parameter that its forward "
                    "returned; got one, which does not change the shards. Write into the "
                    "parameter: with torch.no_grad(): p.copy_(...)."
                )

    def watch(self, index: int, tensors: Iterable[torch.Tensor], *, is_inner: bool = True) -> bool:
        """Begin the unit's backward when the gradient of any of these tensors arrives.

        Args:
            index: Index of the unit.
            tensors: The tensors that it computed.
            is_inner: Whether these are outputs of inner modules, of which there are many.

        Returns:
            Whether any of the tensors is part of an autograd graph.
        """
        use = self._current[index]
        if use is None or (is_inner and self._task != -1 and self.is_in_backward()):
            return False  # outside the unit, or in a recomputation
        is_found = False
        for tensor in tensors if not is_transforming() else unwrapped(tensors):
            if not tensor.requires_grad or issubclass(type(tensor), _NOT_MADE):
                continue
            is_found, base = True, tensor._base  # that of a modified view has a node, too
            for node in (tensor.grad_fn,) if base is None else (tensor.grad_fn, base.grad_fn):
                number = -1 if node is None else node._sequence_nr()
                if node is None or (number < use.first_node and use.thread == get_ident()):
                    continue
                # A prehook runs after the hooks of tensors, but costs a handle. Inner outputs
                # share a tensor hook, which registers a prehook when it is called.
                if is_inner:
                    node._register_hook_dict(self._node_hooks[index].holder)
                else:
                    node.register_prehook(use.enter)
        return is_found

    def _begin_step(self, index: int, *, stale: bool) -> None:
        if self._task != -1 or self.stack or any(unit.swapped for unit in self.units):
            self.close_interrupted()  # open since an exception; KeyboardInterrupt calls no hook
        self._outer = graph_task_id()
        if self._outer != -1:  # a backward inside it must reach no parameter
            end = partial(setattr, self, "_outer", -1)
            self._outer_end = ref(end)
            queue_callback(end)
        self._current = [None] * len(self.units)  # graphs alone keep uses alive from here on
        for hook in self._node_hooks:
            hook.call(None)
        if torch.is_grad_enabled():
            casts = torch.is_autocast_enabled(self.gradients.norms.device.type)
            awaits = any(use.task == -1 for use in self._uses)  # for a backward
            self._shares_casts = awaits and (casts or self._shares_casts)
            if not awaits:  # no live graph can share casts with this forward's
                torch.clear_autocast_cache()
        self._check_copies()
        self.before_step()
        self._see_writes()  # those through `to_local`, too, which a backward would see otherwise
        of = self.units[index].plan.name or "the model"
        self.gradients.transport.phase.next = f"a forward of {of}"
        self._run(self.scheduler.begin_forward(index, stale=stale))
        if index != 0:
            return
        self._generation += 1
        if not self.observed.done and torch.is_grad_enabled() and self._outer == -1:
            self.observed = Observed(self._generation)

    def follow_writes(self) -> None:
        """Gather open units again if a forward wrote into shards (a momentum encoder)."""
        num_writes = self.gradients.home.num_writes
        if num_writes != self.num_followed and not self.is_in_backward():
            self.num_followed = num_writes
            self._see_writes()
            self._run(self.scheduler.see_writes())

    def _see_writes(self) -> None:
        """See [Note: versions] in engine/computed.py. What open units wrote is forgotten."""
        with no_guard():
            for unit in self.units:
                if unit.swapped:
                    unit.check_writes()
                unit.versions.see_writes()

    def has_graph(self) -> bool:
        """Whether there is a live graph that a backward may still read."""
        return any(use.task == -1 or use.retained for use in self._uses)

    def _finish_reading(self, *, settled: bool) -> None:
        """Let other ranks write shared weights, unless a live graph will read them."""
        if not self.has_graph():
            self.gradients.home.finish_reading(settled=settled)

    # ---- backward

    def _enter_backward(self, use: Use) -> None:
        task = graph_task_id()
        if use.task == task:
            return
        if self._task != task and not self._begin_backward(task):
            self._enter_nested(use)
            return
        use.task, use.retained = task, self._retains
        if use.around is not None:
            self._enter_backward(use.around)
        unit = self.units[use.unit]
        self._run(self.scheduler.enter_backward(use.unit))
        if not self.observed.done and use.generation == self.observed.generation:
            self.observed.backward.append(use.unit)
        self._open(unit)

    def _enter_nested(self, use: Use) -> None:
        """See [Note: a backward inside a backward]."""
        if use.around is not None:
            self._enter_nested(use.around)
        unit = self.units[use.unit]
        self._run(self.scheduler.enter_nested(use.unit))
        unit.wait()
        unit.versions.mark(is_open=True)
        self._open(unit)

    def _open(self, unit: Unit) -> None:
        if self.gradients.home.num_writes != self.num_followed:
            check_fresh(unit, self.gradients.home, self.num_followed)
        if unit not in self._opened:
            unit.check_params()
            self._opened.add(unit)
            unit.swap_in()

    def _check_nested(self, task: int) -> None:
        """Check that a backward inside another reaches no parameter."""
        if self._nested != task:
            for unit in self.units:
                if any(is_reached(member) for member in unit.trained_members):
                    raise EngineError(REENTRANT.format(title=unit.plan.title))
            self._nested = task

    def _begin_backward(self, task: int) -> bool:
        """Begin a backward; False for one inside another, which changes nothing.

        Raises:
            EngineError: It is inside another one and reaches parameters, or makes a graph, or
                the model was sharded again since the forward.
        """
        if self._task != -1 and self._end() is None:
            self.reset()  # the last backward raised and never ended
        is_inside = self._outer not in (-1, task) and self._outer_end() is not None
        if is_inside or self._end() is not None:
            self._check_nested(task)
        check_graph(self.cut_anew)
        if self._task != -1:
            return False
        self._task = task
        self._see_writes()
        with no_guard():  # `requires_grad` may have changed since the forward
            for group in (group for unit in self.units for group in unit.trained_groups):
                group.follow_freezing()
        if not self.observed.done:
            self.observed.backward.clear()  # an earlier use reached no parameter
        if self.gradients.home.wrote:
            self._run(self.scheduler.publish())
        nothing = self.gradients.begin_backward(self.units)
        home, sync = self.gradients.home, self.gradients.sync
        stale = home.num_writes != self.num_followed and not self.stack  # p.data.mul_() since then
        self.num_followed = home.num_writes
        reduce, self._retains = self.gradients.expects_any, keeps_graph()
        if reduce and not self.observed.done:
            self.agree_on_frozen()
        self.scheduler.begin_backward(
            nothing, sync=sync, retains=self._retains, stale=stale, reduce=reduce
        )
        end = partial(self._end_backward)
        self._end = ref(end, self._close_backward)
        queue_callback(end)
        return True

    def on_gradient(self, member: Member) -> None:
        """Collect a compute parameter's final gradient, and reduce a complete unit.

        All parameters are on one device, and autograd calls their hooks on its one thread.
        """
        task, unit = graph_task_id(), member.group.unit
        if self._task != task:  # raises in a backward inside another one, which reaches a parameter
            self._begin_backward(task)
        if not member.expected:
            raise EngineError(REENTRANT.format(title=unit.plan.title))
        is_gone = not self.scheduler.is_gathered(unit.index)
        if is_gone and unit.plan.reads_weight_in_backward and not self._shares_casts:
            raise SlotError(
                f"{member.piece.name}: its gradient arrived while the slot of {unit.plan.title} "
                "contained another unit, so it was computed from wrong weights. A tensor made "
                "inside the unit left it undetected; return it from forward, or make the unit "
                "larger."
            )
        if self.gradients.collect(unit, member):
            self._run(self.scheduler.complete(unit.index))

    def _end_backward(self) -> None:
        reduce = self.gradients.expects_any
        _begin_last_gather(self)
        self._run(self.scheduler.end_backward())
        synced = self.gradients.synced is Sync.ALL
        if not synced:
            self.gradients.show_pending(self.units)
        self._close_backward()
        self._task = self._nested = -1
        if reduce and synced:  # made by all ranks; ranks may differ in deferred ones
            self.observed.done = self.observed.done or bool(self.observed.backward)
            self.step += 1
        self.gradients.call_hooks()  # which may evaluate the model
        self._end = _nothing

    def _close_backward(self, *_: Any) -> None:
        """Show the user's parameters in the modules; also when autograd dropped the callback."""
        while self._opened:
            self._opened.pop().swap_out()

    # ---- recovery

    def close_interrupted(self) -> None:
        """Reset the state that an exception left open.

        Raises:
            EngineError: Weights that a forward went on to show were written meanwhile.
        """
        try:
            for unit in self.units:
                if unit.swapped:
                    unit.check_writes()
        finally:
            self.reset()

    def reset(self) -> None:
        """Reset all state that an exception left open."""
        if self._end is not _nothing:  # ranks that did not raise wait in backward for this one
            self._end = _nothing
            for event in self.scheduler.abandon_backward():
                if event.kind is EventKind.ACCUMULATE:
                    self.gradients.drop(self.units[event.unit])
                else:
                    self._run([event])
        for unit in self.units:
            if unit.swapped:
                unit.swapped = 0
                unit.show_shards()
        self._opened.clear()
        if self._task != -1:  # not after a forward: gradients that no_sync deferred are complete
            self.gradients.reset(self.units)
        self.scheduler.reset()
        self.stack.clear()
        self._kept.clear()
        self._current = [None] * len(self.units)
        self._task = self._nested = -1
        if not self.observed.done:
            self.observed = Observed()

    def _run(self, events: Sequence[Event]) -> None:
        if events:
            self.actions.run(events, self.step)


def _begin_last_gather(runtime: Runtime) -> None:
    """At the end of a pass: this rank may have left out the unit, for which peers wait."""
    if not runtime.stack and (disk := runtime.gradients.norms.disk) is not None:
        disk.begin()


@uncompiled
def _enter_after_hooks(use: Use, _: Any) -> None:
    """Enter a unit's backward once the hooks of the tensor whose gradient arrived have run.

    They may differentiate through other units. If the backward ends at the tensor, nothing follows.
    """
    entered = use.task == graph_task_id()
    if not entered and use not in (node := current_node()).metadata:  # of an earlier backward
        node.metadata[use] = None
        node.register_prehook(use.enter)


_NOT_MADE = (Guarded, Released)  # classes of tensors that a unit's forward only passes on


def _nothing() -> None:
    """`Runtime._end` without a running backward: like a dead weak reference."""


# ---- the action of each event

WAITS = frozenset(EventKind) - {EventKind.DEFER}  # events that may wait for other ranks


class Actions:
    """Carries out and records events.

    Args:
        units: The model's units in plan order, bound to their slots.
        gradients: Collects, reduces and shows gradients.
        recorder: Records every event.
        poison: Fill released slots with NaN.

    Attributes:
        communication_s: Seconds spent in events that may wait for other ranks.
    """

    def __init__(
        self, units: Sequence[Unit], gradients: Gradients, recorder: Recorder, *, poison: bool
    ) -> None:
        self.recorder = recorder
        self.communication_s = 0.0
        self._units, self._poison, self._counts = units, poison, gradients.norms.counts
        self._mesh, self._norms = gradients.transport.axes.mesh, gradients.norms
        self._passes = False  # whether the last gather's pass has used no unit since
        self._titles = [*(f" {unit.plan.title}" for unit in units), ""]  # the last one for unit -1
        self.filling: dict[Any, Unit] = {}  # the unit whose gather was last issued into a slot
        self._of: dict[EventKind, Callable[[Event], None]] = {
            EventKind.PUBLISH: lambda _: gradients.home.publish(),
            EventKind.GATHER: self._gather,
            EventKind.FORWARD: self._use,
            EventKind.BACKWARD: self._use,
            EventKind.RELEASE: self._release,
            EventKind.REDUCE: lambda event: self._sum(gradients.reduce, event),
            EventKind.ACCUMULATE: lambda event: self._sum(gradients.accumulate, event),
            EventKind.DEFER: lambda event: gradients.move(units[event.unit]),
            EventKind.SETTLE: lambda _: gradients.settle(units),
        }

    def run(self, events: Sequence[Event], step: int) -> None:
        """Carry out events in order, outside autograd and the user's torch modes."""
        if has_modes():
            with outside_modes(), torch.no_grad():
                self._run(events, step)
            return
        was_enabled = torch.is_grad_enabled()
        enable_gradients(False)
        try:
            self._run(events, step)
        finally:
            enable_gradients(was_enabled)

    def _run(self, events: Sequence[Event], step: int) -> None:
        recorder, act = self.recorder, self._act_named if is_profiling() else self.act
        for event in events:
            recorder.begin(event, step)
            act(event)
            recorder.record(event, step)

    def seconds(self) -> float:
        """Seconds so far in events that may wait for other ranks."""
        return self.communication_s

    def act(self, event: Event) -> None:
        kind, start = event.kind, perf_counter()
        self._of[kind](event)
        if kind in WAITS:
            self.communication_s += perf_counter() - start

    def _act_named(self, event: Event) -> None:
        """Carry out an event under a name for the profiler."""
        with torch.profiler.record_function(self._name_of(event)):
            self.act(event)

    def _name_of(self, event: Event) -> str:
        return f"fullshard {event.kind}{self._titles[event.unit]}"

    def _sum(self, act: Callable[[Unit], None], event: Event) -> None:
        if self._passes and self._norms.disk is not None:
            self._norms.disk.begin()  # of a unit that this rank leaves out, and peers wait for
        act(self._units[event.unit])

    def _gather(self, event: Event) -> None:
        unit, self._passes = self._units[event.unit], True
        for group in unit.groups:
            if group.plan.slot is not None:
                key = (group.plan.slot.ring, group.plan.slot.index)
                previous = self.filling.get(key)
                if previous is not None:
                    previous.wait()  # prefetched and never entered
                    previous.versions.mark(is_open=False)
                self.filling[key] = unit
        unit.start_gather()
        if unit.gathered and (unit.plan.mesh.replicate == 1 or unit.plan.mesh == self._mesh):
            kind = Count.GATHERS if unit.plan.mesh.replicate == 1 else Count.REPLICAS
            self._counts[kind] = hash((self._counts[kind], event.unit)) & 0xFFFF_FFFF

    def _use(self, event: Event) -> None:
        unit, self._passes = self._units[event.unit], False
        unit.wait()
        if event.kind is EventKind.FORWARD or unit.plan.reads_weight_in_backward:
            unit.versions.mark(is_open=True)

    def _release(self, event: Event) -> None:
        unit = self._units[event.unit]
        unit.wait()
        unit.versions.mark(is_open=False)
        if self._poison:
            unit.poison()
