"""Checks that collectives are called only in the places listed in ALLOWED.

All ranks call collectives in one order, because the plan fixes it and only the engine calls
`fullshard.transport`. A collective that is called elsewhere is in no plan. The script finds, under
any import alias:

    torch.distributed.all_reduce(...)          functions of torch.distributed and its submodules
    group.allreduce(...)                       methods of process groups
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

# Places that may call collectives, and why.
ALLOWED = {
    "src/fullshard/transport/": "the one package that moves bytes between ranks",
    "src/fullshard/launch/rendezvous.py": "creates and destroys the process group",
    "src/fullshard/bench/": "runs the peers (FSDP2, FSDP1, DDP) and compares ranks' figures",
}
MODULES = (
    "torch.distributed.distributed_c10d",
    "torch.distributed._functional_collectives",
    "torch.distributed.nn.functional",
    "torch.distributed",
    "fullshard.transport._torch_compat",  # defines renamed ones
)
FUNCTIONS = {
    "_all_gather_base",
    "_reduce_scatter_base",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_gather_tensor",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "P2POp",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
}
# Spellings that only process groups have, so that the name alone tells.
METHODS = {
    "_allgather_base",
    "_reduce_scatter_base",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "reduce_scatter_tensor_coalesced",
}


def imported_names(tree: ast.AST) -> dict[str, str]:
    """Returns the full dotted name of each local name that the file imports."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                full = alias.name if alias.asname else alias.name.split(".")[0]
                names[alias.asname or full] = full
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def dotted(node: ast.expr, names: dict[str, str]) -> str | None:
    """The full dotted name that an expression like `dist.all_reduce` stands for."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        base = dotted(node.value, names)
        return f"{base}.{node.attr}" if base else None
    return None


def is_collective(full_name: str) -> bool:
    """Whether a full dotted name is one of torch's collectives."""
    module, _, function = full_name.rpartition(".")
    return module in MODULES and function in FUNCTIONS


def check_source(source: str, path: str) -> list[str]:
    """Returns a line for each collective that a file calls or passes as an argument."""
    tree = ast.parse(source)
    names = imported_names(tree)
    found: dict[int, str] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Name | ast.Attribute):
            continue
        full = dotted(node, names)
        if full and is_collective(full):
            found[node.lineno] = full
        elif isinstance(node, ast.Attribute) and node.attr in METHODS:
            found.setdefault(node.lineno, f"<process group>.{node.attr}")
    return [
        f"{path}:{line}: {name} called here; expected only in {', '.join(ALLOWED)}. "
        f"Go through a function of fullshard.engine."
        for line, name in sorted(found.items())
    ]


def main(root: Path) -> int:
    """Checks the package; returns 1 if another place calls a collective."""
    found: list[str] = []
    num_files = 0
    for file in sorted((root / "src").rglob("*.py")):
        path = file.relative_to(root).as_posix()
        if not path.startswith(tuple(ALLOWED)):
            num_files += 1
            found.extend(check_source(file.read_text(encoding="utf-8"), path))
    print(f"  {num_files} files checked, {len(found)} collective calls in other places")
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent))
