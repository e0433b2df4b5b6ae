"""Parameters sharded over other mesh axes (tensor or expert parallelism), as DTensors.

[Note: two cuts]
The layout contains the local tensor of such a parameter. A gathered slot contains the local tensors
of this rank's coordinates on the other axes. Only this file handles the other axes:

    whole --Cut.local_of--> local tensor --flat layout--> slice on this rank
    slice ----gather------> local tensor --Cut.show-----> DTensor in forward
    gradient of forward ---Cut.gradient--> local gradient --reduce-scatter--> slice
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fullshard.engine._torch_compat import is_distributed, local_tensor
from fullshard.errors import ConfigError, UnsupportedModelError

EXPERT_AXES = ("expert", "ep")  # names of axes whose ranks see batches of their own


@dataclass(frozen=True)
class Cut:
    """The sharding of a parameter over other axes.

    Attributes:
        mesh: DeviceMesh of these axes.
        placements: Placement on each of these axes.
        shape: Shape of the whole parameter.
        stride: Strides of the whole parameter, in elements.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, param: Any) -> Cut | None:
        """Returns the cut of a parameter or shard; None without other axes."""
        record = getattr(param, "record", None)
        if record is not None:
            return record.cut
        if not is_distributed(param):
            return None
        shape, stride = tuple(param.shape), tuple(param.stride())
        return cls(param.device_mesh, tuple(param.placements), shape, stride)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the mesh."""
        return tuple(self.mesh.mesh.flatten().tolist())

    @cached_property
    def _cut_axes(self) -> list[int]:
        return [i for i, placement in enumerate(self.placements) if not placement.is_replicate()]

    @property
    def num_parts(self) -> int:
        """Number of different local tensors."""
        return math.prod(self.mesh.size(axis) for axis in self._cut_axes)

    @property
    def part(self) -> int:
        """Index of this rank's local tensor."""
        found = 0
        for axis in self._cut_axes:
            found = found * self.mesh.size(axis) + self.mesh.get_local_rank(axis)
        return found

    @property
    def is_first_copy(self) -> bool:
        """Whether this rank is the first of the ranks with the same local tensor."""
        copied = set(range(len(self.placements))).difference(self._cut_axes)
        return not any(map(self.mesh.get_local_rank, copied))

    @cached_property
    def first(self) -> int | None:
        """First element of the local tensor in the whole; None if it is not a contiguous range."""
        if any(self.placements[axis].dim != 0 for axis in self._cut_axes):
            return None
        rows = self.local_of(torch.arange(math.prod(self.shape[:1]))).tolist()
        first = rows[0] if rows else 0
        is_range = rows == list(range(first, first + len(rows)))
        return first * math.prod(self.shape[1:]) if is_range else None

    @property
    def spreads_experts(self) -> bool:
        """Whether each rank of an axis of experts has other ones."""
        return any(axis in EXPERT_AXES and "Shard" in at for axis, at in self.by_axis.items())

    @property
    def by_axis(self) -> dict[str, str]:
        """Placements by the names of axes."""
        names = self.mesh.mesh_dim_names or [f"axis {i}" for i in range(len(self.placements))]
        return dict(zip(names, map(repr, self.placements), strict=True))

    def describe(self) -> str:
        """Axes and placements as text."""
        return ", ".join(f"{axis} {placement}" for axis, placement in self.by_axis.items())

    def show(self, local: torch.Tensor) -> Any:
        """Returns a DTensor over the memory of a local tensor. No communication."""
        from torch.distributed.tensor import DTensor

        shape, stride = torch.Size(self.shape), self.stride
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=shape, stride=stride
        )

    def whole_of(self, local: torch.Tensor) -> torch.Tensor:
        """Gathers the whole tensor. A collective of the mesh."""
        with torch.no_grad():
            return self.show(local).full_tensor()

    def local_of(self, whole: Any) -> torch.Tensor:
        """Returns this rank's part of a whole tensor (without communication) or of a DTensor."""
        from torch.distributed.tensor import distribute_tensor

        with torch.no_grad():
            if is_distributed(whole):
                return whole.redistribute(self.mesh, self.placements).to_local()
            placed = distribute_tensor(whole, self.mesh, self.placements, src_data_rank=None)
            return placed.to_local()

    def gradient(self, gradient: Any) -> torch.Tensor:
        """Returns the local tensor of a gradient with the parameter's placement.

        A collective of the mesh if placements differ, for example for a replicated weight used with
        different parts of a sequence.
        """
        if not is_distributed(gradient):
            return gradient
        if gradient.placements != self.placements:
            gradient = gradient.redistribute(placements=self.placements)
        local: Any = local_tensor(gradient)
        return local.wait() if hasattr(local, "wait") else local


def check_cuts(
    params: Iterable[tuple[str, Any]], own: Iterable[int], inner: Iterable[int]
) -> dict[str, tuple[int, ...]]:
    """Checks that parameters use exactly the mesh's remaining axes, or are experts.

    Args:
        params: Names and parameters, before they are sharded.
        own: Ranks of the replicate and shard axes, which have different batches.
        inner: Ranks of the other axes at this rank's coordinates on these two.

    Returns:
        The ranks over which experts are cut, by name: ranks with different batches.

    Raises:
        UnsupportedModelError: A parameter is sharded over the shard axis, or in an unknown way.
        ConfigError: A remaining axis of the mesh shards no parameter.
    """
    data, rest = set(own), set(inner)
    seen: set[int] = set()
    experts: dict[str, tuple[int, ...]] = {}
    for name, param in params:
        cut = Cut.of(param)
        if cut is None:
            continue
        seen.update(() if cut.spreads_experts else cut.ranks)
        where = f"{name}: expected a DTensor of axes beside the shard axis, placed by Shard or "
        where += f"Replicate; got {cut.describe()}"
        if any(placement.is_partial() for placement in cut.placements):
            raise UnsupportedModelError(f"{where}. Redistribute partial sums before fs.shard.")
        if set(cut.ranks) <= rest:
            continue
        if not cut.spreads_experts:
            raise UnsupportedModelError(
                f"{where}, over ranks {sorted(cut.ranks)}, while ranks {sorted(data)} share the "
                "replicate and shard axes. Make one mesh of all axes, init_device_mesh(device, "
                "(shard, tensor), mesh_dim_names=('shard', 'tensor')), parallelize over "
                "mesh['tensor'] and call fs.shard(model, mesh=mesh['shard']). An axis of experts, "
                "whose ranks exchange the tokens of their own batches, is named "
                f"{' or '.join(EXPERT_AXES)}. FSDP2's p.full_tensor() is whole."
            )
        experts[name] = cut.ranks
    if len(rest) > 1 and rest - seen:
        raise ConfigError(
            "mesh: expected axes beside replicate and shard along which parameters are DTensors; "
            f"ranks {sorted(rest)} are on others, and {sorted(rest - seen)} store the same "
            "parameters as this one, but their gradients would not be summed. Name the axis "
            "replicate, shard or expert and pass it to fs.shard (mesh['replicate', 'shard']), or "
            "parallelize the model over it first (torch's parallelize_module, transformers' "
            "tp_plan)."
        )
    return experts
