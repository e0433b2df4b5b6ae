"""Which of a unit's gradients call the engine, and which are found beside them.

[Note: quiet gradients]
A gradient hook takes microseconds of Python, and most small parameters (norms, biases, routers)
need none: autograd leaves their gradients in `compute.grad`, where they stay until someone looks.
So the first backward hears every gradient of a unit and notes their order; from then on the engine
hears the large ones, which are moved at once, each 64th of the others, and the last, and looks for
the rest whenever it hears one:

    order noted     norm2  down  up  gate  out  bias  qkv  norm1
    heard                  down  up  gate  out        qkv  norm1 (the last)
    found beside    norm2                        bias

A gradient that is there is final: its node runs once a backward, after all uses of the parameter.
When all that are heard have come and others have not, the order was another one; the missing are
heard again, in this backward and for good. So is the whole unit once a backward does not reach all
of its parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from fullshard.errors import EngineError

if TYPE_CHECKING:
    from fullshard.engine.unit import Group, Member, Unit

MOST_WAITING = 64  # small gradients of a unit that wait to be moved together

Pair = tuple["Group", "Member"]


class Listening:
    """The gradient hooks of one unit.

    Args:
        unit: Bound to its slots. Not held: the way from a parameter to its hook leads through C++,
            where the garbage collector sees no cycle, and no model would ever be freed.

    Attributes:
        quiet: Whose gradients are found, not heard.
    """

    def __init__(self, unit: Unit) -> None:
        self.quiet: list[Pair] = []
        self._unit = weakref.ref(unit)
        self._handles: dict[int, Any] = {}
        self._came: list[Pair] = []  # in this backward, as far as the order counts
        self._still_heard = 0  # will call in this backward
        self._learns = True
        self._hear((group, member) for group in unit.trained for member in group.members)

    def begin_backward(self, num_expected: int, num_trained: int) -> None:
        """A backward is about to reach so many of the unit's trained parameters."""
        if num_expected < num_trained:
            self._hear_again(self.quiet)
        self._came = []
        self._still_heard = num_expected - len(self.quiet)

    def hear(self, pair: Pair) -> Sequence[Pair]:
        """A gradient called; returns it and those that are found beside it."""
        self._still_heard -= 1
        if self.quiet:
            found = [pair, *(other for other in self.quiet if other[1].compute.grad is not None)]
        else:
            found = [pair]
        self._came += found
        return found

    def settle(self, num_missing: int) -> None:
        """What was found is moved; so many of the unit's gradients have not come yet."""
        if num_missing == 0:
            if self._learns:
                self._learn()
        elif self._still_heard == 0:
            came = self.came()
            self._hear_again([pair for pair in self.quiet if id(pair[1]) not in came])

    def came(self) -> set[int]:
        """Ids of the members that called or were found in this backward."""
        return {id(member) for _, member in self._came}

    def _learn(self) -> None:
        """Everything came, in this order: hear no more of it than is needed."""
        self._learns, waiting, last = False, 0, self._came[-1]
        for pair in self._came:
            waiting += 1
            if pair[1].is_large or waiting == MOST_WAITING:
                waiting = 0
            elif pair is not last:
                self.quiet.append(pair)
                self._handles.pop(id(pair[1])).remove()

    def _hear_again(self, pairs: Iterable[Pair]) -> None:
        again = {id(member) for _, member in pairs}
        self._hear(pair for pair in self.quiet if id(pair[1]) in again)
        self.quiet = [pair for pair in self.quiet if id(pair[1]) not in again]
        self._still_heard += len(again)
        self._learns = False

    def _hear(self, pairs: Iterable[Pair]) -> None:
        for group, member in pairs:
            hook = _hook(self._unit, weakref.ref(group), weakref.ref(member))
            self._handles[id(member)] = member.node.register_hook(hook)


def _hook(
    unit: weakref.ref[Unit], group: weakref.ref[Group], member: weakref.ref[Member]
) -> Callable[..., None]:
    """What a parameter's node calls when its gradient is final, also where autograd brings none."""

    def hook(*_: Any) -> None:
        alive = unit()
        if alive is None:
            raise EngineError("backward: expected the sharded model to exist; it was deleted.")
        alive.on_gradient(alive, group(), member())  # type: ignore[arg-type]

    return hook
