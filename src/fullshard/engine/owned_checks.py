"""What may be changed of an owned optimizer once it is made, and what its inner one may keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fullshard.errors import EngineError
from fullshard.planner.layout import clean_name

Groups = list[dict[str, Any]]


class MadeWith:
    """The groups that an owned optimizer was made with.

    Args:
        groups: Its own, then those of `beside`.
        beside: Steps with it.
    """

    def __init__(self, groups: Groups, beside: torch.optim.Optimizer | None) -> None:
        self._lists, self._beside = _lists(groups), beside
        num_own = len(groups) - (0 if beside is None else len(beside.param_groups))
        self._others = {id(param) for group in groups[num_own:] for param in group["params"]}

    def find_edits(
        self,
        groups: Groups,
        wholes: Sequence[tuple[nn.Parameter, nn.Parameter]],
        states: tuple[Mapping[Any, Any], Mapping[Any, Any]],
    ) -> EngineError | None:
        """What was changed that the owners' optimizer would not know of.

        Args:
            groups: As they are now.
            wholes: Each of the user's parameters and its whole.
            states: By the user's parameters, and by wholes.
        """
        beside = [] if self._beside is None else _lists(self._beside.param_groups)
        if _lists(groups) != self._lists or beside != self._lists[len(groups) - len(beside) :]:
            return EngineError(
                "fs.owned: expected the groups that it was made with, whose numbers alone may "
                "change; groups or parameters came, went or moved. Make it anew."
            )
        known = self._others | {id(param) for param, _ in wholes}
        for param in (param for group in groups for param in group["params"]):
            if param.grad is not None and id(param) not in known:
                return EngineError(
                    f"fs.owned: expected {name_of(param)} without a gradient, because it was "
                    "frozen when this was made. Make it anew."
                )
        shown, kept = states
        for param, whole in wholes:
            mine = shown.get(param, {})
            if any(mine.get(key) is not value for key, value in kept.get(whole, {}).items()):
                return EngineError(
                    f"fs.owned: expected the states of {name_of(param)} to be changed in place; "
                    "they were replaced or cleared. Write into their tensors, or make it anew."
                )
        return None


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What an optimizer keeps that belongs to no parameter; switches are no counts."""

    def plain(value: Any) -> Any:
        return value.tolist() if isinstance(value, torch.Tensor) else value

    own = {k: v for k, v in vars(optimizer).items() if type(v) in (int, float) and k[0] != "_"}
    groups = optimizer.param_groups
    return [own, *({k: plain(v) for k, v in g.items() if k != "params"} for g in groups)]


def name_of(param: Any) -> str:
    """How errors speak of a parameter."""
    record = getattr(param, "record", None)
    return (
        repr(clean_name(record.piece.name))
        if record is not None
        else f"one of shape {tuple(param.shape)}"
    )


def _lists(groups: Groups) -> list[tuple[int, list[int]]]:
    """Which groups there are, of which parameters."""
    return [(id(group), [id(param) for param in group["params"]]) for group in groups]
