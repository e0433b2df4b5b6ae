"""The plan of the XLA engine: how arrays are sharded over devices, and a step's collectives.

JAX users expect a parameter to keep its shape, so there are no flat buffers: each array is sharded
along one of its dimensions. Equal blocks are stacked on a first axis, the layer axis, which is
never sharded: a scan over it gathers one block at a time.

    (layers, out, in), 4 devices, out the largest that divides:    device 0  [:, 0:out/4, :]
                                                                   device 1  [:, out/4:out/2, :] ...

Tensor and expert axes cut other dimensions first, by rules on names. Devices compute with their
parts as they are. Those of a tensor axis share a batch; those of an expert axis have batches of
their own, and other arrays than experts are sharded over them too:

    out over tensor 2, in over shard 2:    tensor 0, shard 0  [:, 0:out/2, 0:in/2]
                                           tensor 1, shard 0  [:, out/2:out, 0:in/2] ...
    experts over expert 2, out over shard 2:    expert 0, shard 0  [:, 0:experts/2, 0:out/2, :] ...
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fullshard.config.values import Recompute, Strategy
from fullshard.planner.memory import AVERAGE, MemoryRow
from fullshard.planner.mesh import Mesh, row_of
from fullshard.planner.optimizers import ADAMW, OptimizerStates
from fullshard.planner.spec import ITEMSIZE
from fullshard.planner.text import PlanDocument, axes_of, decode_plan, human_bytes
from fullshard.planner.units import DtypeContract

PADDED_ABOVE = 65_536  # elements: smaller arrays without a divisible dimension are replicated
GATHER, SCATTER, REDUCE = "all-gather", "reduce-scatter", "all-reduce"


@dataclass(frozen=True, slots=True)
class ArrayCut:
    """How an array is sharded.

    Attributes:
        dim: The sharded dimension; None: every device stores the whole array.
        padding: Zeros at the end of the dimension that make it divisible.
        tensor: The dimension that the tensor axis cuts, never `dim`; None: none. Experts are cut
            along their first dimension, over the expert and tensor axes together.
        parts: Number of parts along that dimension.
    """

    dim: int | None = None
    padding: int = 0
    tensor: int | None = field(default=None, metadata={"omitted": None})
    parts: int = field(default=1, metadata={"omitted": 1})


def cut_of(
    shape: Sequence[int], num_parts: int, tensor: int | None = None, parts: int = 1
) -> ArrayCut:
    """Return a cut along the largest divisible dimension; large arrays without one are padded.

    Args:
        shape: Shape without the layer axis.
        num_parts: Number of devices on the shard axis.
        tensor: See `ArrayCut`.
        parts: See `ArrayCut`.
    """
    dims = [dim for dim in range(len(shape)) if dim != tensor]
    fitting = [dim for dim in dims if shape[dim] % num_parts == 0]
    is_small = math.prod(shape) // parts < PADDED_ABOVE and not fitting
    if num_parts == 1 or 0 in shape or not dims or is_small:
        return ArrayCut(tensor=tensor, parts=parts)
    dim = max(fitting or dims, key=lambda dim: (shape[dim], -dim))
    return ArrayCut(dim, -shape[dim] % num_parts, tensor, parts)


@dataclass(frozen=True, slots=True)
class ArrayPlan:
    """One array of a model.

    Attributes:
        name: Dotted path in the tree.
        shape: Shape of one layer if stacked, else of the array; without padding.
        cut: How the array is sharded.
        dtypes: Dtypes of the array.
        trainable: Whether the optimizer updates it.
        block: Path of the stacked subtree that contains it; "" if it is not stacked.
        num_layers: Length of the layer axis; 0 if it is not stacked.
    """

    name: str
    shape: tuple[int, ...]
    cut: ArrayCut
    dtypes: DtypeContract
    trainable: bool = True
    block: str = ""
    num_layers: int = 0

    @property
    def numel(self) -> int:
        """Elements of all layers, without padding."""
        return math.prod(self.shape) * (self.num_layers or 1)

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape of one layer with padding."""
        return tuple(
            size + self.cut.padding * (dim == self.cut.dim) for dim, size in enumerate(self.shape)
        )

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of one gathered layer on a device: its part along the tensor axis."""
        cut = self.cut
        return tuple(
            size // cut.parts if dim == cut.tensor else size
            for dim, size in enumerate(self.padded_shape)
        )

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the stored array, over all devices."""
        return ((self.num_layers,) if self.block else ()) + self.padded_shape

    def whole_bytes(self, use: str) -> int:
        """Returns the bytes of one gathered layer, in the dtype of a use in `DtypeContract`."""
        return math.prod(self.part_shape) * ITEMSIZE[getattr(self.dtypes, use)]

    def names(self) -> list[str]:
        """Returns its tensors' names in a checkpoint: `layers.w` is `layers.0.w` and so on."""
        if not self.block:
            return [self.name]
        rest = self.name.removeprefix(self.block)
        return [f"{self.block}.{layer}{rest}" for layer in range(self.num_layers)]


@dataclass(frozen=True, slots=True)
class Collectives:
    """Number of collectives of one kind in a step, and bytes of the full tensors that they move."""

    count: int = 0
    num_bytes: int = 0

    def plus(self, times: int, num_bytes: int) -> Collectives:
        """Returns the sum with `times` collectives of `num_bytes` each."""
        return Collectives(self.count + times, self.num_bytes + times * num_bytes)


@dataclass(frozen=True, slots=True)
class ArraysPlan(PlanDocument):
    """The plan of the XLA engine, as plain data.

    Attributes:
        model_kind: Name of the model's type.
        strategy: The configured strategy.
        mesh: Sizes of the mesh axes.
        arrays: Arrays in the order of the tree's leaves.
        recompute: Activation checkpointing of the blocks.
        optimizer: State sizes of the optimizer; AdamW if there is no run.
        traced: (micro-batches, kind, number, bytes) of the collectives of each traced step.
    """

    model_kind: str
    strategy: Strategy
    mesh: Mesh
    arrays: tuple[ArrayPlan, ...]
    recompute: Recompute
    optimizer: OptimizerStates = ADAMW
    traced: tuple[tuple[int, str, int, int], ...] = ()

    def with_traced(self, num_micro_batches: int, moved: Mapping[str, Collectives]) -> ArraysPlan:
        """Returns the plan with the collectives of a traced step of that many micro-batches."""
        others = [row for row in self.traced if row[0] != num_micro_batches]
        rows = [(num_micro_batches, kind, c.count, c.num_bytes) for kind, c in moved.items()]
        return replace(self, traced=(*others, *rows))

    def trained_by(self, optimizer: OptimizerStates) -> ArraysPlan:
        """Returns the plan with another optimizer."""
        return replace(self, optimizer=optimizer)

    @property
    def most_parts(self) -> int:
        """The largest number of parts that the tensor and expert axes cut an array into."""
        return max([self.mesh.inner, *(array.cut.parts for array in self.arrays)])

    def mesh_of(self, array: ArrayPlan) -> Mesh:
        """Returns the mesh of an array: experts are sharded over fewer devices than the others."""
        return self.mesh.spread(array.cut.parts)

    @property
    def reshards(self) -> bool:
        """Whether blocks are gathered again in backward."""
        return row_of(self.strategy).reshard_after_forward and self.mesh.shard > 1

    @property
    def num_parameters(self) -> int:
        """Number of parameters, without padding."""
        return sum(array.numel for array in self.arrays)

    def own_numel(self, array: ArrayPlan) -> int:
        """Returns the elements of an array that one device stores, padding included."""
        whole = math.prod(array.part_shape) * (array.num_layers if array.block else 1)
        return whole if array.cut.dim is None else whole // self.mesh_of(array).shard

    def collectives(self, num_micro_batches: int = 1) -> dict[str, Collectives]:
        """Returns the collectives of a training step.

        They are those of the traced step, or, before there is one, the most that the arrays need:
        blocks are gathered again in backward if the strategy reshards. There is one per tensor. A
        small one sums the loss, the label tokens (rounded, and in bytes, which float32 adds
        exactly) and the squared norm of the gradients. Sums over a tensor axis and exchanges over
        an expert axis are the model's own: the traced step has them.
        """
        known = {
            row[1]: Collectives(*row[2:]) for row in self.traced if row[0] == num_micro_batches
        }
        if known:
            return known
        found: dict[str, Collectives] = dict.fromkeys((GATHER, SCATTER, REDUCE), Collectives())
        for array in self.arrays:
            for kind, times, num_bytes in self._of_array(array):
                once = kind == GATHER and not array.block  # gathered once for all micro-batches
                found[kind] = found[kind].plus(
                    times * (1 if once else num_micro_batches), num_bytes
                )
        scalar = max(ITEMSIZE[array.dtypes.accumulate] for array in self.arrays)
        if self.mesh.num_copies > 1:
            # loss, norm, and a count that is as wide, rounded and as bytes
            found[REDUCE] = found[REDUCE].plus(1, (3 + scalar) * scalar)
        return found

    def forward_gathers(self, num_micro_batches: int = 1) -> Collectives:
        """Returns the gathers of a model that only runs forward, such as a teacher."""
        found = Collectives()
        for array in self.arrays:
            if array.cut.dim is not None:
                times = array.num_layers * num_micro_batches if array.block else 1
                found = found.plus(times, array.whole_bytes("compute"))
        return found

    def _of_array(self, array: ArrayPlan) -> Iterator[tuple[str, int, int]]:
        """(kind, number, bytes of the full tensor) of an array's collectives in a micro-batch."""
        layers, mesh = array.num_layers or 1, self.mesh_of(array)
        if array.cut.dim is not None:
            again = bool(array.block) and self.reshards
            yield GATHER, layers * (1 + again), array.whole_bytes("compute")
        if not array.trainable:
            return
        if array.cut.dim is not None:
            yield SCATTER, layers, array.whole_bytes("reduce")
            if mesh.replicate > 1:
                yield REDUCE, layers, array.whole_bytes("accumulate") // mesh.shard
        elif mesh.num_copies > 1:
            yield REDUCE, layers, array.whole_bytes("reduce")

    @property
    def memory(self) -> tuple[MemoryRow, ...]:
        """Memory rows of a device, without activations and temporaries of XLA."""
        trained = [a for a in self.arrays if a.trainable]

        def total(arrays: Sequence[ArrayPlan], kind: str) -> int:
            return sum(self.own_numel(a) * ITEMSIZE[getattr(a.dtypes, kind)] for a in arrays)

        kept, state = self.optimizer, total(trained, "master")
        return (
            MemoryRow("parameter shards", total(self.arrays, "master")),
            MemoryRow("gradient shards", total(trained, "accumulate")),
            MemoryRow(kept.row, kept.num_states * state),
            *[MemoryRow(AVERAGE, kept.num_averages * state)] * (kept.num_averages > 0),
            MemoryRow("gathered arrays", self._gathered_bytes()),
        )

    def _gathered_bytes(self) -> int:
        """Bytes of gathered arrays: outside of blocks, and one block (all blocks if kept)."""
        cut = [array for array in self.arrays if array.cut.dim is not None]
        held = [1 if self.reshards or not array.block else array.num_layers for array in cut]
        return sum(n * array.whole_bytes("compute") for n, array in zip(held, cut, strict=True))

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters and optimizer states, which are a step's input and output."""
        state = ("parameter", "optimizer", "average")
        return sum(row.num_bytes for row in self.memory if row.name.startswith(state))

    @property
    def num_units(self) -> int:
        """Number of blocks, plus one for the other arrays."""
        return 1 + sum({a.block: a.num_layers for a in self.arrays if a.block}.values())

    @property
    def staging_bytes(self) -> int:
        """Most host bytes that a process copies to save a checkpoint."""
        return self.state_bytes

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of all tensors in a checkpoint."""
        total = 0.0
        for array in self.arrays:
            itemsize = ITEMSIZE[array.dtypes.master]
            kept = self.optimizer.kept_bytes(itemsize) if array.trainable else 0
            total += array.numel * (itemsize + kept)
        return math.ceil(total)

    def tree(self) -> str:
        """Returns arrays, cuts, collectives and memory as text."""
        mesh = self.mesh
        lines = [
            f"{self.model_kind}: {self.num_parameters:,} parameters, {self.strategy} on "
            f"{mesh.world_size} devices ({axes_of(self)})",
            *(f"  {_array_line(array)}" for array in self.arrays),
            "a step's collectives (full tensors):",
            *(
                f"  {kind}: {c.count:,}, {human_bytes(c.num_bytes)}"
                for kind, c in self.collectives().items()
            ),
            "memory of a device (state only):",
            *(f"  {row.name}: {human_bytes(row.num_bytes)}" for row in self.memory),
        ]
        whole = [a for a in self.arrays if a.cut.dim is None and self.mesh_of(a).shard > 1]
        if whole:
            num_bytes = sum(a.numel * ITEMSIZE[a.dtypes.master] for a in whole)
            lines.append(f"replicated, since no dimension is divisible: {human_bytes(num_bytes)}")
        return "\n".join(lines)

    @classmethod
    def from_json(cls, text: str) -> ArraysPlan | None:
        """Returns the plan that `to_json` wrote; None if it is a plan of the torch engine."""
        table = json.loads(text)
        return decode_plan(cls, table) if "arrays" in table else None


def _array_line(array: ArrayPlan) -> str:
    layers, cut = f"{array.num_layers} x " if array.block else "", array.cut
    how = "replicated" if cut.dim is None else f"dim {cut.dim} sharded"
    padded = f" (+{cut.padding})" if cut.padding else ""
    parts = "" if cut.tensor is None else f", dim {cut.tensor} in {cut.parts} parts"
    frozen = "" if array.trainable else ", frozen"
    return f"{array.name}  {layers}{array.shape}  {how}{padded}{parts}{frozen}"
