"""What the planner knows of a model: modules, parameters, buffers. Names, shapes and dtypes only.

An adapter in the engine makes a `ModelSpec` from a module (on meta or not); the planner never sees
a tensor. Modules stand in registration order, parents before children, the root first with name "".
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fullshard.config.values import DType, did_you_mean
from fullshard.errors import ConfigError

ITEMSIZE = {DType.FLOAT64: 8, DType.FLOAT32: 4, DType.BFLOAT16: 2, DType.FLOAT16: 2}


def parent_name(name: str) -> str:
    """The dotted path above `name`; the root's is ""."""
    return name.rpartition(".")[0]


def is_inside(name: str, ancestor: str) -> bool:
    """Whether module `name` is `ancestor` or lies below it."""
    return ancestor == "" or name == ancestor or name.startswith(ancestor + ".")


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter, by storage identity.

    Attributes:
        names: Every dotted name that leads to it; more than one where weights are tied. The first
            is the one that `named_parameters()` gives.
        shape: Global shape.
        dtype: Dtype that it has in the model as given.
        trainable: `requires_grad`.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: DType
    trainable: bool

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """One module.

    Attributes:
        name: Dotted path.
        kind: Class name.
        is_container: It only holds children (ModuleList, ModuleDict, Sequential).
        can_be_unit: False for what is not called, or not always: ModuleList and ModuleDict, and
            nn.MultiheadAttention with what lies in it, whose weights others read directly.
        reads_weight_in_backward: False for embeddings: their backward needs indices alone, so the
            weight need not be gathered again.
    """

    name: str
    kind: str
    is_container: bool = False
    can_be_unit: bool = True
    reads_weight_in_backward: bool = True


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as the planner sees it.

    Attributes:
        saved_buffer_bytes: Bytes of buffers that a state dict has.
    """

    kind: str
    modules: tuple[ModuleSpec, ...]
    params: tuple[ParamSpec, ...]
    buffer_bytes: int = 0
    saved_buffer_bytes: int = 0

    @property
    def numel(self) -> int:
        """Parameters in all, each tied one once."""
        return sum(param.numel for param in self.params)

    def without(self, patterns: Iterable[str]) -> ModelSpec:
        """Leave out the parameters whose name, or whose module's name, matches a glob."""
        globs = tuple(patterns)
        kept = tuple(p for p in self.params if not any(matches(name, globs) for name in p.names))
        return replace(self, params=kept)


def check_globs(key: str, globs: Iterable[str], names: Sequence[str], what: str) -> None:
    """Every glob must name something.

    Raises:
        ConfigError: One names nothing; says the nearest name.
    """
    for glob in globs:
        if not any(matches(name, (glob,)) for name in names):
            near = did_you_mean(glob.replace("*", ""), names)
            raise ConfigError(
                f"{key}: expected names (globs) of {what}; got {glob!r}, which is none. "
                f"{near or 'Names look like ' + ', '.join(names[:3]) + '.'}"
            )


def matches(param_name: str, globs: tuple[str, ...]) -> bool:
    """Whether a glob names this parameter or a module above it."""
    path = param_name
    while path:
        if any(fnmatch.fnmatchcase(path, glob) for glob in globs):
            return True
        path = parent_name(path)
    return False
