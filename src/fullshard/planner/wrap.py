"""The choice of units: modules that are gathered and freed together. Nothing is wrapped.

`wrap="auto"` uses structure, not names. The members of the outermost lists of equal modules are the
repeated blocks. An embedding or a head that is at least as large as a block is a unit. All other
parameters belong to the root.

    Llama                    unit          role
    |-- embed_tokens         own, large    embedding
    |-- layers
    |   |-- 0                own           block
    |   `-- 1                own           block
    |-- norm                 root's
    `-- lm_head              own, large    head      (tied to embed_tokens: both are the root's)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from enum import StrEnum
from itertools import groupby

from fullshard.config.values import Recompute, RecomputeKind, WrapKind, nearest
from fullshard.errors import WrapError
from fullshard.planner.mesh import Mesh
from fullshard.planner.spec import ModelSpec, ModuleSpec, is_inside, parent_name

LARGE_MODEL = 100_000_000  # parameters; one unit for a larger model needs wrap: none


class Role(StrEnum):
    """The role of a unit in the model, which selects its ring."""

    ROOT = "root"
    BLOCK = "block"
    EMBEDDING = "embedding"
    HEAD = "head"


Wrap = WrapKind | tuple[str, ...] | frozenset[str]  # class names; modules that a callable chose


def choose_units(
    spec: ModelSpec, wrap: Wrap, min_params: int, also: Collection[str] = ()
) -> dict[str, Role]:
    """Returns the units' modules and roles, the root first, then in registration order.

    Args:
        spec: The model.
        wrap: A `WrapKind`, class names, or the modules that a callable chose.
        min_params: Fewest parameters of a unit under `wrap="size"`.
        also: Names of further modules that become units.

    Raises:
        WrapError: A named class is not in the model, the model has no repeated blocks, or a large
            model would be one single unit.
    """
    tree = _Tree(spec)
    chosen = _choose(tree, wrap, min_params)
    also = {*also, *_experts(tree)}
    for module in spec.modules:
        if module.name in also and module.can_be_unit and tree.meshes[module.name]:
            chosen.setdefault(module.name, Role.BLOCK)
    chosen.pop("", None)
    if not chosen and wrap is not WrapKind.NONE and spec.numel > LARGE_MODEL:
        said = f"[{', '.join(wrap)}]" if isinstance(wrap, tuple) else wrap
        said = "the callable" if isinstance(wrap, frozenset) else said
        raise WrapError(
            f"wrap: expected more than one unit for a model of {spec.numel:,} parameters, got none "
            f"inside {spec.kind} from {said}. One unit gathers the whole model at once. Name the "
            "class of its blocks (wrap: [ClassName]), or wrap: none if you want one unit. Classes "
            f"in it: {', '.join(tree.kinds())}."
        )
    chosen[""] = Role.ROOT
    return {module.name: chosen[module.name] for module in spec.modules if module.name in chosen}


def _choose(tree: _Tree, wrap: Wrap, min_params: int) -> dict[str, Role]:
    match wrap:
        case WrapKind.NONE:
            return {}
        case WrapKind.AUTO | WrapKind.TRANSFORMER:
            blocks = _repeated_blocks(tree)
            if not blocks and wrap is WrapKind.TRANSFORMER:
                raise WrapError(
                    f"wrap: transformer expects a list of equal blocks, got {tree.spec.kind}, "
                    "which has none. Use wrap: auto, size or [ClassName]. Classes in it: "
                    f"{', '.join(tree.kinds())}."
                )
            return dict.fromkeys(blocks, Role.BLOCK) | _ends(tree, blocks)
        case WrapKind.SIZE:
            found = list(_by_size(tree, min_params))
        case frozenset():
            found = _named(tree, [module for module in tree.spec.modules if module.name in wrap])
        case _:
            found = _by_class(tree, wrap)
    return dict.fromkeys(found, Role.BLOCK)


def repeated_blocks(spec: ModelSpec) -> tuple[str, ...]:
    """Returns the names of the repeated blocks, list by list."""
    return tuple(_repeated_blocks(_Tree(spec)))


class _Tree:
    """Children and parameter counts by module name.

    Experts are not counted: they have units of their own, and their number may differ by rank,
    while the choice of all other units must not.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.root = spec.modules[0]
        self.kind_of = {module.name: module.kind for module in spec.modules}
        self.children: dict[str, list[ModuleSpec]] = defaultdict(list)
        for module in spec.modules[1:]:
            self.children[parent_name(module.name)].append(module)
        self.numel: Counter[str] = Counter()  # below each module, a tied parameter once
        self.own: Counter[str] = Counter()
        self.tied: set[str] = set()
        self.meshes: dict[str, set[Mesh | None]] = defaultdict(set)  # of all parameters below
        for param in spec.params:
            owners = {parent_name(name) for name in param.names}
            if len(param.names) > 1:
                self.tied |= owners
            for owner in owners:
                self.own[owner] += param.numel
            for path in {path for owner in owners for path in _lineage(owner)}:
                self.numel[path] += 0 if param.mesh else param.numel
                self.meshes[path].add(param.mesh)

    def kinds(self) -> list[str]:
        """Returns the class names of modules that may be units, in registration order."""
        members = (m for m in self.spec.modules if self.meshes[m.name] and m.can_be_unit)
        return list(dict.fromkeys(m.kind for m in members))

    def total(self, members: Sequence[ModuleSpec]) -> int:
        """Returns the number of parameters of several modules."""
        return sum(self.numel[member.name] for member in members)


def _lineage(path: str) -> Iterator[str]:
    """A module's path and the paths above it; the root's is last."""
    while path:
        yield path
        path = parent_name(path)
    yield ""


def _experts(tree: _Tree) -> list[str]:
    """The outermost modules whose parameters share a mesh that is not the model's."""
    found: list[str] = []
    for module in tree.spec.modules:
        is_apart = len(tree.meshes[module.name]) == 1 and None not in tree.meshes[module.name]
        if is_apart and module.can_be_unit and not any(is_inside(module.name, n) for n in found):
            found.append(module.name)
    return found


def _repeated_blocks(tree: _Tree) -> list[str]:
    """The members of lists of equal modules.

    The members of a list that is smaller than the largest block belong to its parent: gathering
    them one by one would cost time and save little memory.
    """
    lists = _find_lists(tree, tree.root)
    largest = max((tree.numel[m.name] for members in lists for m in members), default=0)
    return [
        member.name for members in lists if tree.total(members) >= largest for member in members
    ]


def _find_lists(tree: _Tree, module: ModuleSpec) -> list[list[ModuleSpec]]:
    """The outermost lists of equal modules at or below a module."""
    members = [child for child in tree.children[module.name] if tree.numel[child.name]]
    inner = [found for child in members for found in _find_lists(tree, child)]
    is_list = module.is_container and len(members) >= 2 and _are_alike(tree, members)
    if is_list and not _are_stages(tree, members, inner):
        return [members]
    return inner


def _are_alike(tree: _Tree, members: Sequence[ModuleSpec]) -> bool:
    """Whether modules have one class, or few repeated ones, such as mamba and attention blocks."""
    if not all(member.can_be_unit for member in members):
        return False
    kinds = {member.kind for member in members}
    are_composite = all(tree.children[member.name] for member in members)
    return len(kinds) == 1 or (are_composite and 2 * len(kinds) <= len(members))


def _are_stages(
    tree: _Tree, members: Sequence[ModuleSpec], inner: Sequence[Sequence[ModuleSpec]]
) -> bool:
    """Whether the members are stages that contain the blocks, as in ConvNeXt, Swin or ResNet.

    Stages differ in size, and each contains a list. Most transformer blocks have equal sizes, even
    if they contain lists of experts.
    """
    sizes = {tree.numel[member.name] for member in members}
    widen = len(sizes) == len(members) and max(sizes) >= 2 * min(sizes)
    hold_lists = all(
        any(is_inside(found[0].name, member.name) for found in inner) for member in members
    )
    listed = sum(tree.total(found) for found in inner)
    return widen and hold_lists and 2 * listed >= tree.total(members)


def _ends(tree: _Tree, blocks: Sequence[str]) -> dict[str, Role]:
    """Untied embeddings and heads that are at least as large as the largest block."""
    if not blocks:
        return {}
    inside = set(blocks)
    threshold = max(tree.numel[name] for name in inside)
    first = min(i for i, m in enumerate(tree.spec.modules) if m.name in inside)
    ends: dict[str, Role] = {}
    for i, module in enumerate(tree.spec.modules[1:], start=1):
        name = module.name
        if tree.own[name] < threshold or name in tree.tied or tree.children[name]:
            continue
        if any(is_inside(name, block) for block in blocks) or not module.can_be_unit:
            continue
        is_embedding = not module.reads_weight_in_backward or i < first
        ends[name] = Role.EMBEDDING if is_embedding else Role.HEAD
    return ends


def _by_size(tree: _Tree, minimum: int) -> Iterator[str]:
    """Modules with at least `minimum` parameters outside of other units, from the leaves up.

    The choice equals that of torch's size_based_auto_wrap_policy.
    """
    in_units: Counter[str] = Counter()
    for module in reversed(tree.spec.modules):  # children before parents
        total = tree.numel[module.name]
        if total < minimum:
            continue
        taken = sum(in_units[child.name] for child in tree.children[module.name])
        if total - taken >= minimum and module.can_be_unit:
            taken = total
            yield module.name
        in_units[module.name] = taken


def _by_class(tree: _Tree, classes: tuple[str, ...]) -> list[str]:
    present = tree.kinds()
    missing = [name for name in classes if name not in present]
    if missing:
        blocks = dict.fromkeys(tree.kind_of[block] for block in _repeated_blocks(tree))
        hint = f" Its blocks are {', '.join(blocks)}." if blocks else ""
        if guess := nearest(missing[0], present):
            hint = f" Did you mean '{guess}'?"
        raise WrapError(
            f"wrap: expected classes of modules with parameters in {tree.spec.kind}, got "
            f"'{missing[0]}'.{hint} Present: {', '.join(present)}."
        )
    return _named(tree, [module for module in tree.spec.modules if module.kind in classes])


def _named(tree: _Tree, modules: Sequence[ModuleSpec]) -> list[str]:
    """The user's modules that have parameters."""
    chosen = [module for module in modules if tree.numel[module.name]]
    for module in chosen:
        if not module.can_be_unit and module.name:
            raise WrapError(
                "wrap: expected modules that are called whenever their weights are used, got "
                f"'{module.name}' ({module.kind}). Choose its members, or the module around it."
            )
    return [module.name for module in chosen]


def recomputed_modules(spec: ModelSpec, recompute: Recompute) -> tuple[str, ...]:
    """Returns the modules whose forward is recomputed in backward.

    `block` and `selective` return every repeated block; `every_k` block 0, k, 2k ... of each list.

    Raises:
        WrapError: The model has no repeated blocks.
    """
    if recompute.kind is RecomputeKind.NONE:
        return ()
    blocks = repeated_blocks(spec)
    if not blocks:
        raise WrapError(
            f"activation_checkpointing: {recompute} expects a list of equal blocks; {spec.kind} "
            "has none. Call torch.utils.checkpoint.checkpoint(..., use_reentrant=False) in its "
            "forward."
        )
    return tuple(
        name
        for _, members in groupby(blocks, key=parent_name)
        for name in list(members)[:: recompute.every]
    )
