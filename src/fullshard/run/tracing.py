"""Memory and compute of a micro-batch, from tracing the run's own model and loss.

[Note: traced in part]
Only some blocks of a deep model are traced. If blocks repeat with period p (1 if all are alike),
the difference between a model of 2p blocks and one of p is what every further p blocks add. If the
full depth is r more than a multiple of p, models of p + r and 2p + r blocks are traced. Blocks
before the first period (the dense ones of a mixture of experts) are in both.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from typing import Any

import torch
from torch import nn

from fullshard.config.schema import ShardConfig
from fullshard.config.values import RecomputeKind
from fullshard.engine.model_spec import spec_of
from fullshard.engine.tracing import trace_step, trace_work
from fullshard.planner.plan import Plan
from fullshard.planner.spec import is_inside, parent_name
from fullshard.planner.tracing import Moment, Peaks, Work, between, peaks, peaks_between
from fullshard.planner.wrap import recomputed_modules, repeated_blocks
from fullshard.recipes.base import whole_logits_loss
from fullshard.recipes.distill.recipe import PlannedTeacher
from fullshard.recipes.head import MOST_TRACED, Head, next_token

logger = logging.getLogger(__name__)

MOST_BLOCKS = 12  # deeper models are traced in part
MOST_SAMPLES = 3  # larger micro-batches are extrapolated from two traces


@dataclass(eq=False)
class Tracer:
    """Traces micro-batches of a causal language model, each kind once.

    Attributes:
        model: Model on meta; a copy, if its head is replaced.
        length: Tokens of a sample.
        teacher: Teacher of the model, if any.
        chunk_size: Tokens whose logits are in memory at a time; None: all tokens.
        on_gpu: Whether the steps will run on a GPU.
    """

    model: nn.Module
    length: int
    teacher: PlannedTeacher | None = None
    chunk_size: int | None = None
    on_gpu: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        self.spec = spec_of(self.model)
        if self.teacher is not None or self.chunk_size is not None:
            self.model = copy.deepcopy(self.model)
            Head(self.model)
        self._traces: dict[Any, list[Moment]] = {}
        self._found: dict[Any, Any] = {}

    def __call__(self, plan: Plan, config: ShardConfig, samples: float) -> Peaks | None:
        """The moments at which most memory is allocated; None if the model cannot be traced.

        Args:
            plan: Plan of the model.
            config: Sharding that the plan was made for, with its recompute.
            samples: Samples of a micro-batch.
        """
        what = "activations: computed from shapes"
        return self._once(self._find_peaks, what, len(plan.units), (plan, config, samples))

    def work(self, plan: Plan, config: ShardConfig, samples: float) -> Work | None:
        """The operations of every unit; None if the model cannot be traced.

        Blocks that were not traced compute what the traced blocks of their kind compute.
        """
        names = tuple(unit.name for unit in plan.units)
        return self._once(self.find_work, "step time: unknown", names, (plan, config, samples))

    def _once(
        self, find: Callable[..., Any], what: str, units: Any, of: tuple[Plan, ShardConfig, float]
    ) -> Any:
        """Calls `find` once per kind of plan; logs `what` and returns None if the trace fails."""
        plan, config, samples = of
        recompute = config.activation_checkpointing
        dtypes = frozenset(group.dtypes for unit in plan.units for group in unit.groups)
        key = (recompute, dtypes, units)
        if (key, samples) in self._found:
            return self._found[key, samples]
        found = None
        if recompute.kind is not RecomputeKind.OFFLOAD and samples == int(samples):
            plan = replace(plan, recompute=recomputed_modules(self.spec, recompute))
            try:
                found = find(plan, config, key, int(samples))
            except Exception as error:  # noqa: BLE001  a model's own code runs here
                said = (str(error).splitlines() or [""])[0]
                logger.info("%s, since a trace met %s", what, said)
        self._found[key, samples] = found
        return found

    def find_work(self, plan: Plan, config: ShardConfig, _: Any, samples: int) -> Work:
        work, blocks = self._work(samples, MOST_TRACED), repeated_blocks(self.spec)
        step, depth = self._depth(blocks, config)
        if depth is None:
            return trace_work(self.model, plan, config, work)
        model, part = _shallow(self.model, plan, blocks[depth:])
        found = trace_work(model, part, config, work)
        for at in range(depth, len(blocks)):
            like = blocks[at - step * -(-(at - depth + 1) // step)]
            alike = [name for name in found if is_inside(name, like)]
            found |= {blocks[at] + name[len(like) :]: found[name] for name in alike}
        return found

    def _find_peaks(self, plan: Plan, config: ShardConfig, key: Any, samples: int) -> Peaks | None:
        blocks = repeated_blocks(self.spec)
        step, depth = self._depth(blocks, config)
        if depth is None:
            return self._peaks(plan, config, (key, None), samples)
        depths = (depth - step, depth)
        ends = [self._peaks(plan, config, (key, depth), samples) for depth in depths]
        return between(ends[0], ends[1], depths, len(blocks))

    def _depth(self, blocks: Sequence[str], config: ShardConfig) -> tuple[int, int | None]:
        """Period of the blocks, and how many of them to trace; None: all."""
        first, period = self._pattern(blocks)
        step = math.lcm(period, config.activation_checkpointing.every)
        depth = first + 2 * step + (len(blocks) - first) % step
        return step, None if len(blocks) <= max(MOST_BLOCKS, depth) else depth

    def _pattern(self, blocks: Sequence[str]) -> tuple[int, int]:
        """Number of first blocks, and after how many blocks the others repeat."""
        if len(list(groupby(blocks, key=parent_name))) != 1:  # none, or in several lists
            return 0, len(blocks) or 1
        settings: Any = self.model.config
        kinds = getattr(settings.get_text_config(), "layer_types", None) or [None] * len(blocks)
        named = [self.model.get_submodule(block).named_parameters() for block in blocks]
        signs = [
            (kind, *((n, p.shape, p.requires_grad) for n, p in of_block))
            for kind, of_block in zip(kinds, named, strict=True)
        ]
        known: dict[Any, int] = {}  # small numbers compare faster
        marks = [known.setdefault(sign, len(known)) for sign in signs]
        pairs = product(range(len(marks)), range(1, len(marks) + 1))
        patterns = sorted(pairs, key=lambda at: at[0] + 2 * at[1])
        return next(at for at in patterns if marks[sum(at) :] == marks[at[0] : -at[1]])

    def _peaks(self, plan: Plan, config: ShardConfig, key: Any, samples: int) -> Peaks:
        """Peaks of a model with all blocks, or with the first ones."""
        if samples <= MOST_SAMPLES:
            return peaks(self.trace(plan, config, key, samples))
        at = (MOST_SAMPLES - 1, MOST_SAMPLES)
        ends = [self.trace(plan, config, key, size) for size in at]
        found = peaks_between(ends[0], ends[1], at, samples)
        return found or peaks(self.trace(plan, config, key, samples))

    def trace(self, plan: Plan, config: ShardConfig, key: Any, samples: int) -> list[Moment]:
        known = (key, samples)
        if known not in self._traces:
            model, depth = self.model, key[1]
            if depth is not None:
                model, plan = _shallow(model, plan, repeated_blocks(self.spec)[depth:])
            beside, work = self.teacher.beside if self.teacher else (), self._work(samples)
            ledger = trace_step(model, plan, config, work, beside, on_gpu=self.on_gpu)
            self._traces[known] = ledger.moments
        return self._traces[known]

    def _work(self, samples: int, most_chunks: int | None = None) -> Any:
        """Forward and loss of the recipe, or of the student next to its teacher.

        Chunks are larger if there would be more than `most_chunks`; they compute the same.
        """
        if self.teacher is not None:
            return self.teacher.work(samples, self.length)
        shape, size = (samples, self.length), self.chunk_size
        if size is not None and most_chunks is not None:
            size = max(size, -(-samples * self.length // most_chunks))

        def work(model: nn.Module) -> torch.Tensor:
            ids, labels = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
            objective = whole_logits_loss if size is None else next_token(Head.of(model), size)
            return objective(model, {"input_ids": ids, "labels": labels})[0] * 1.0

        return work


def _shallow(model: Any, plan: Plan, dropped: Sequence[str]) -> tuple[nn.Module, Plan]:
    """A model and its plan without the last blocks; the dropped blocks are not copied."""
    blocks = model.get_submodule(parent_name(dropped[0]))
    short, memo = copy.copy(blocks), {}
    kept = list(blocks._modules.items())[: len(blocks) - len(dropped)]
    vars(short)["_modules"] = dict(kept)
    memo[id(blocks)] = blocks = copy.deepcopy(short, memo)
    model = copy.deepcopy(model, memo)
    model.config.get_text_config().num_hidden_layers = len(blocks)
    units = tuple(u for u in plan.units if not any(is_inside(u.name, d) for d in dropped))
    recompute = tuple(name for name in plan.recompute if name not in dropped)
    return model, replace(plan, units=units, recompute=recompute)
