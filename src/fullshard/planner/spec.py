"""The planner's description of a model: names, shapes and dtypes of modules and parameters.

An adapter in the engine makes a `ModelSpec` from a module (on meta or not); the planner never sees
a tensor. Modules are in registration order, parents before children. The root is first and has the
name "".
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fullshard.config.values import DType, did_you_mean
from fullshard.errors import ConfigError
from fullshard.planner.mesh import Mesh

ITEMSIZE = {DType.FLOAT64: 8, DType.FLOAT32: 4, DType.BFLOAT16: 2, DType.FLOAT16: 2}


def parent_name(name: str) -> str:
    """Returns the dotted path above `name`; "" for the root and its children."""
    return name.rpartition(".")[0]


def is_inside(name: str, ancestor: str) -> bool:
    """Whether module `name` is `ancestor` or is below it."""
    return ancestor == "" or name == ancestor or name.startswith(ancestor + ".")


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter, by storage identity.

    Attributes:
        names: Every dotted name of the parameter; tied weights have several. The first name is
            that of `named_parameters()`.
        shape: Global shape.
        dtype: Dtype in the given model.
        trainable: `requires_grad`.
        mesh: The mesh of experts, which are not cut over the model's mesh; None for all others.
        parts: Number of different parts that other axes cut it into; `shape` is that of a part.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: DType
    trainable: bool
    mesh: Mesh | None = None
    parts: int = 1

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
        is_container: Whether it only has children (ModuleList, ModuleDict, Sequential).
        can_be_unit: False for modules that are not always called: ModuleList and ModuleDict, and
            nn.MultiheadAttention and its children, whose weights other modules read directly.
        reads_weight_in_backward: False for embeddings, whose backward needs only indices, so that
            the weight is not gathered again.
    """

    name: str
    kind: str
    is_container: bool = False
    can_be_unit: bool = True
    reads_weight_in_backward: bool = True


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The description of a model.

    Attributes:
        kind: Class name of the model.
        modules: Modules in registration order.
        params: Parameters, each tied one once.
        buffer_bytes: Bytes of all buffers.
        saved_buffer_bytes: Bytes of the buffers in a state dict.
    """

    kind: str
    modules: tuple[ModuleSpec, ...]
    params: tuple[ParamSpec, ...]
    buffer_bytes: int = 0
    saved_buffer_bytes: int = 0

    @property
    def numel(self) -> int:
        """Number of parameters; tied ones count once."""
        return sum(param.numel for param in self.params)

    def without(self, patterns: Iterable[str]) -> ModelSpec:
        """Returns the model without parameters whose name, or module's name, matches a glob."""
        globs = tuple(patterns)
        kept = tuple(p for p in self.params if not any(matches(name, globs) for name in p.names))
        return replace(self, params=kept)


def check_globs(key: str, globs: Iterable[str], names: Sequence[str], what: str) -> None:
    """Checks that every glob matches a name.

    Raises:
        ConfigError: A glob matches nothing; the error has the nearest name.
    """
    for glob in globs:
        if not any(matches(name, (glob,)) for name in names):
            near = did_you_mean(glob.replace("*", ""), names)
            raise ConfigError(
                f"{key}: expected names (globs) of {what}; got {glob!r}, which matches none. "
                f"{near or 'Names look like ' + ', '.join(names[:3]) + '.'}"
            )


def check_any_trained(freeze: Sequence[str], num_trained: int) -> None:
    """Raises ConfigError if globs of frozen parameters leave nothing to train."""
    if not num_trained:
        raise ConfigError(
            f"freeze: expected globs that leave something to train, got {list(freeze)}, which "
            "freeze all parameters. Freeze fewer."
        )


def matches(param_name: str, globs: tuple[str, ...]) -> bool:
    """Whether a glob matches this parameter or a module above it."""
    path = param_name
    while path:
        if any(fnmatch.fnmatchcase(path, glob) for glob in globs):
            return True
        path = parent_name(path)
    return False
