"""Under which names a Hugging Face folder stores what a model computes with.

Most tensors have one name. The experts of a layer are one tensor to the model, many in the files:

    model    ...mlp.experts.gate_up_proj   [experts, 2 x inner, hidden]
    files    ...mlp.experts.0.gate_proj.weight   ...0.up_proj.weight   ...1.gate_proj.weight   ...
             |------------- the model's elements in row-major order -------------|

so that whoever wants a range of the model's elements reads ranges of these.

References:
    transformers' conversion_mapping.py, "qwen2_moe" and "mixtral" with those that name them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable

_IN_FILES = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
# The model's leaf, and in which families of names its parts are kept, in order.
_PARTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
# Mixtral's files name the block after what it is, the model as every other one does.
_BLOCKS = ((".mlp.", ".block_sparse_moe."),)


class StoredNames:
    """The names of a folder's files.

    Args:
        names: Names of all its tensors.
        prefix: The base model's, with its dot: files of the base model alone lack it.
    """

    def __init__(self, names: Collection[str], prefix: str) -> None:
        self._names = names
        self._prefix = prefix
        experts: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
        for name in names:
            found = _IN_FILES.fullmatch(name)
            if found:
                experts[found[1], found[3]][int(found[2])] = name
        self._experts = {
            key: [of[n] for n in range(len(of))]
            for key, of in experts.items()
            if of.keys() == set(range(len(of)))
        }

    def parts(self, names: Iterable[str]) -> tuple[str, ...]:
        """The stored tensors that hold a tensor's elements, one after another; () if none do.

        Args:
            names: All that the model has for it.
        """
        for name in names:
            for spelling in self._spellings(name):
                found = (spelling,) if spelling in self._names else self._of_experts(spelling)
                if found and not any(self._is_scaled(part) for part in found):
                    return found
        return ()

    def _is_scaled(self, name: str) -> bool:
        """Whether a tensor's values are those of the files times others: it is quantized."""
        return any(name + ending in self._names for ending in ("_scale_inv", "_scale"))

    def _spellings(self, name: str) -> list[str]:
        spellings = [name]
        if self._prefix and name.startswith(self._prefix):
            spellings.append(name.removeprefix(self._prefix))
        elif self._prefix:
            spellings.append(self._prefix + name)
        others = [s.replace(ours, theirs) for s in spellings for ours, theirs in _BLOCKS]
        return spellings + [other for other in others if other not in spellings]

    def _of_experts(self, name: str) -> tuple[str, ...]:
        block, _, leaf = name.rpartition(".")
        for family in _PARTS.get(leaf, ()):
            columns = [self._experts.get((block, part), []) for part in family]
            if columns[0] and len({len(column) for column in columns}) == 1:
                return tuple(name for row in zip(*columns, strict=True) for name in row)
        return ()
