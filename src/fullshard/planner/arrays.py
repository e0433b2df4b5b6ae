"""Where arrays lie on a mesh of XLA devices, and which collectives a step of them makes.

JAX users expect a parameter to keep its shape, so nothing is laid into flat buffers here: each
array is cut along one dimension of its own. Blocks that are alike are stacked on a first axis, the
layer axis, which is never cut: a scan over it gathers one block at a time.

    (layers, out, in), 4 devices, out the largest that divides:    device 0  [:, 0:out/4, :]
                                                                   device 1  [:, out/4:out/2, :] ...
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fullshard.config.values import Recompute, RecomputeKind, Strategy
from fullshard.planner.homes import Place
from fullshard.planner.memory import AVERAGE, MemoryRow
from fullshard.planner.mesh import Mesh
from fullshard.planner.optimizers import ADAMW, OptimizerStates
from fullshard.planner.spec import ITEMSIZE
from fullshard.planner.strategy import row_of
from fullshard.planner.text import decode_plan, encode_plan, format_json, human_bytes
from fullshard.planner.units import DtypeContract

PADDED_ABOVE = 65_536  # elements: what is smaller and divides nowhere is copied instead
GATHER, SCATTER, REDUCE = "all-gather", "reduce-scatter", "all-reduce"


@dataclass(frozen=True, slots=True)
class Cut:
    """How an array is parted over the shard axis.

    Attributes:
        dim: The dimension that is parted; None: every device holds the whole.
        padding: Zeros added at the dimension's end so that it divides.
    """

    dim: int | None = None
    padding: int = 0


def cut_of(shape: Sequence[int], num_parts: int) -> Cut:
    """The largest dimension that divides, the first of equals; else padded if the array is large.

    Args:
        shape: Without the layer axis.
        num_parts: Devices of the shard axis.
    """
    if num_parts == 1 or 0 in shape:
        return Cut()
    fitting = [dim for dim, size in enumerate(shape) if size % num_parts == 0]
    if fitting:
        return Cut(max(fitting, key=lambda dim: (shape[dim], -dim)))
    if math.prod(shape) < PADDED_ABOVE:
        return Cut()
    dim = max(range(len(shape)), key=lambda dim: (shape[dim], -dim))
    return Cut(dim, -shape[dim] % num_parts)


@dataclass(frozen=True, slots=True)
class ArrayPlan:
    """One array of a model.

    Attributes:
        name: Its path in the tree, dotted.
        shape: Shape of one layer where it is stacked, else of all of it; without padding.
        cut: How it is parted.
        dtypes: Its contract.
        trainable: Whether it is updated.
        block: Path of the stacked subtree that it belongs to; "" where it is not stacked.
        num_layers: Length of the layer axis; 0 where it is not stacked.
    """

    name: str
    shape: tuple[int, ...]
    cut: Cut
    dtypes: DtypeContract
    trainable: bool = True
    block: str = ""
    num_layers: int = 0

    @property
    def numel(self) -> int:
        """Elements without padding, of all layers."""
        return math.prod(self.shape) * (self.num_layers or 1)

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Of one layer, as it is gathered."""
        return tuple(
            size + self.cut.padding * (dim == self.cut.dim) for dim, size in enumerate(self.shape)
        )

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Of the whole array as it rests, all devices together."""
        return ((self.num_layers,) if self.block else ()) + self.padded_shape

    @property
    def is_added(self) -> bool:
        """Whether it is a bias: it is added, and the gradient of a sum needs neither summand."""
        return self.name.rpartition(".")[2] == "bias"

    def names(self) -> list[str]:
        """As a checkpoint names its tensors, one a layer: `layers.w` is `layers.0.w` and so on."""
        if not self.block:
            return [self.name]
        rest = self.name.removeprefix(self.block)
        return [f"{self.block}.{layer}{rest}" for layer in range(self.num_layers)]

    def part_numel(self, num_parts: int) -> int:
        """Elements that a device holds, padding included."""
        whole = math.prod(self.stored_shape)
        return whole if self.cut.dim is None else whole // num_parts


@dataclass(frozen=True, slots=True)
class Collectives:
    """How often one kind of collective runs in a step, and bytes of the whole tensors it moves."""

    count: int = 0
    num_bytes: int = 0

    def plus(self, times: int, num_bytes: int) -> Collectives:
        """With `times` more of `num_bytes` each."""
        return Collectives(self.count + times, self.num_bytes + times * num_bytes)


@dataclass(frozen=True, slots=True)
class ArraysPlan:
    """What an XLA engine holds and moves, as plain data.

    Attributes:
        model_kind: What people call the model.
        strategy: What was asked for.
        mesh: Sizes of the axes.
        arrays: In the order of the tree's leaves.
        recompute: Activation checkpointing of the blocks.
        optimizer: What the run's keeps; a plan without a run takes AdamW.
    """

    model_kind: str
    strategy: Strategy
    mesh: Mesh
    arrays: tuple[ArrayPlan, ...]
    recompute: Recompute
    optimizer: OptimizerStates = ADAMW

    def trained_by(self, optimizer: OptimizerStates) -> ArraysPlan:
        """The same with another optimizer's memory."""
        return replace(self, optimizer=optimizer)

    @property
    def reshards(self) -> bool:
        """Whether blocks are gathered anew in backward."""
        return row_of(self.strategy).reshard_after_forward and self.mesh.shard > 1

    @property
    def num_parameters(self) -> int:
        return sum(array.numel for array in self.arrays)

    def collectives(self, num_micro_batches: int = 1) -> dict[str, Collectives]:
        """What a training step issues, a tensor each. The census of the compiled step is the same.

        Two small ones sum loss and label tokens (in two parts, which float32 adds exactly), and the
        squared norm of the gradients.
        """
        found: dict[str, Collectives] = dict.fromkeys((GATHER, SCATTER, REDUCE), Collectives())
        for array in self.arrays:
            for kind, times, num_bytes in self._of_array(array):
                once = kind == GATHER and not array.block  # kept over all micro-batches
                found[kind] = found[kind].plus(
                    times * (1 if once else num_micro_batches), num_bytes
                )
        scalar = max(ITEMSIZE[array.dtypes.accumulate] for array in self.arrays)
        if self.mesh.world_size > 1:
            found[REDUCE] = found[REDUCE].plus(1, 3 * scalar)
        if self.mesh.shard > 1:
            found[REDUCE] = found[REDUCE].plus(1, scalar)
        return found

    def forward_gathers(self, num_micro_batches: int = 1) -> Collectives:
        """What a step issues for a model that runs forward alone, such as a teacher."""
        found = Collectives()
        for array in self.arrays:
            if array.cut.dim is not None:
                times = array.num_layers * num_micro_batches if array.block else 1
                size = math.prod(array.padded_shape) * ITEMSIZE[array.dtypes.compute]
                found = found.plus(times, size)
        return found

    def _of_array(self, array: ArrayPlan) -> Iterator[tuple[str, int, int]]:
        """(kind, times, bytes of the whole tensor) of a micro-batch."""
        layers, dtypes = array.num_layers or 1, array.dtypes
        numel = math.prod(array.padded_shape)
        if array.cut.dim is not None:
            yield GATHER, self.num_gathers(array), numel * ITEMSIZE[dtypes.compute]
        if not array.trainable:
            return
        if array.cut.dim is not None:
            yield SCATTER, layers, numel * ITEMSIZE[dtypes.reduce]
            if self.mesh.replicate > 1:
                yield REDUCE, layers, numel // self.mesh.shard * ITEMSIZE[dtypes.accumulate]
        elif self.mesh.world_size > 1:
            yield REDUCE, layers, numel * ITEMSIZE[dtypes.reduce]

    def num_gathers(self, array: ArrayPlan) -> int:
        """How often a micro-batch gathers it, over all layers.

        Blocks are gathered again in backward under a strategy that reshards, but for biases,
        unless a recompute adds them once more.
        """
        layers = array.num_layers or 1
        if not (array.block and self.reshards):
            return layers
        if not array.is_added:
            return 2 * layers
        match self.recompute.kind:
            case RecomputeKind.NONE:
                return layers
            case _:
                return layers + -(-layers // self.recompute.every)

    @property
    def memory(self) -> tuple[MemoryRow, ...]:
        """Bytes of a device. Activations and temporaries of XLA are not in here."""
        shard, trained = self.mesh.shard, [a for a in self.arrays if a.trainable]

        def total(arrays: Sequence[ArrayPlan], kind: str) -> int:
            return sum(a.part_numel(shard) * ITEMSIZE[getattr(a.dtypes, kind)] for a in arrays)

        kept, state = self.optimizer, total(trained, "master")
        averages = MemoryRow(AVERAGE, kept.num_averages * state)
        return (
            MemoryRow("parameter shards", total(self.arrays, "master")),
            MemoryRow("gradient shards", total(trained, "accumulate")),
            MemoryRow(kept.row, kept.num_states * state),
            *([averages] if kept.num_averages else []),
            MemoryRow("gathered arrays", self._gathered_bytes()),
        )

    def _gathered_bytes(self) -> int:
        """Arrays outside of blocks; one block (all of them where they are kept for backward)."""
        total = 0
        for array in self.arrays:
            if array.cut.dim is not None:
                held = 1 if self.reshards or not array.block else array.num_layers
                total += held * math.prod(array.padded_shape) * ITEMSIZE[array.dtypes.compute]
        return total

    @property
    def state_bytes(self) -> int:
        """Parameters and their optimizer's states: what a step is given and gives back."""
        state = ("parameter", "optimizer", "average")
        return sum(row.num_bytes for row in self.memory if row.name.startswith(state))

    @property
    def peak_bytes(self) -> dict[str, int]:
        """State bytes of a device by place."""
        device = sum(row.num_bytes for row in self.memory)
        return {Place.DEVICE: device, Place.HOST: 0, Place.DISK: 0}

    def rows(self) -> list[dict[str, str | int]]:
        """The memory table: [{"name", "bytes"}]."""
        return [{"name": row.name, "bytes": row.num_bytes} for row in self.memory]

    @property
    def num_units(self) -> int:
        """Blocks, and what lies outside of them."""
        return 1 + sum({a.block: a.num_layers for a in self.arrays if a.block}.values())

    @property
    def staging_bytes(self) -> int:
        """Host bytes at most that a process copies to save."""
        return self.state_bytes

    @property
    def checkpoint_bytes(self) -> int:
        """Tensors of one checkpoint, of all devices."""
        total = 0.0
        for array in self.arrays:
            itemsize = ITEMSIZE[array.dtypes.master]
            kept = self.optimizer.kept_bytes(itemsize) if array.trainable else 0
            total += array.numel * (itemsize + kept)
        return math.ceil(total)

    def replicated(self) -> list[ArrayPlan]:
        """Arrays that a sharded strategy leaves whole on every device, since nothing divides."""
        return [a for a in self.arrays if a.cut.dim is None and self.mesh.shard > 1]

    def tree(self) -> str:
        """Arrays, cuts, collectives and memory as text."""
        mesh = self.mesh
        lines = [
            f"{self.model_kind}: {self.num_parameters:,} parameters, {self.strategy} on "
            f"{mesh.world_size} devices (replicate {mesh.replicate} x shard {mesh.shard})",
            *(f"  {_array_line(array)}" for array in self.arrays),
            "a step's collectives (whole tensors):",
            *(
                f"  {kind}: {c.count:,}, {human_bytes(c.num_bytes)}"
                for kind, c in self.collectives().items()
            ),
            "memory of a device (state only):",
            *(f"  {row.name}: {human_bytes(row.num_bytes)}" for row in self.memory),
        ]
        whole = sum(a.numel * ITEMSIZE[a.dtypes.master] for a in self.replicated())
        if whole:
            lines.append(f"whole on every device, since nothing divides: {human_bytes(whole)}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """The plan as JSON that people can read and compare."""
        return format_json(encode_plan(self)) + "\n"

    def digest(self) -> str:
        """A short hash of the JSON."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    @classmethod
    def from_json(cls, text: str) -> ArraysPlan | None:
        """Read back what `to_json` wrote; None for a plan of another kind."""
        table = json.loads(text)
        if "arrays" not in table:
            return None
        kind, every = table["recompute"]
        return replace(decode_plan(cls, table), recompute=Recompute(RecomputeKind(kind), every))


def _array_line(array: ArrayPlan) -> str:
    layers = f"{array.num_layers} x " if array.block else ""
    cut = "whole" if array.cut.dim is None else f"dim {array.cut.dim} parted"
    padded = f" (+{array.cut.padding})" if array.cut.padding else ""
    frozen = "" if array.trainable else ", frozen"
    return f"{array.name}  {layers}{array.shape}  {cut}{padded}{frozen}"
