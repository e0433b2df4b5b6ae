"""Checks files, declarations and links of the repository that no other tool checks.

files          text, at most 1 MB, no path of a machine, no host of a package registry;
               Python in ASCII; the name of a test has at least four words
links          each relative link or image of a page is a file
dependencies   what `src/` imports is declared, what is declared is imported and pinned exactly
make targets   the help lists exactly the phony targets
README         its tables show the committed results
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import readme_table

MAX_BYTES = 1_000_000
# A character class around a letter keeps these patterns from finding themselves.
FORBIDDEN = {
    "path of a machine": re.compile(r"(?<![\w.~-])/(?:ho[m]e|ro[o]t|wo[r]k|fa[r]m|Use[r]s)/\w"),
    "host of a package registry": re.compile(
        r"pyp[i]\.org|pythonhoste[d]|download\.pytorc[h]|index-ur[l]", re.I
    ),
}
TEST = re.compile(r"\s*(?:async )?def (test_\w+)")
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
# Requirement that installs a module of another name.
DISTRIBUTIONS = {
    "huggingface_hub": "transformers",
    "markupsafe": "jinja2",
    "pydantic_core": "pydantic",
    "yaml": "pyyaml",
}
# Peers in benchmarks: imported if they are installed, never required.
OPTIONAL = {"deepspeed", "megatron_fsdp"}
EXTRAS = ("hf", "data", "jax", "lightning", "lora", "stores", "trainer")


def check_file(path: str, content: bytes) -> Iterator[str]:
    """Yields what is wrong in one file."""
    if len(content) > MAX_BYTES:
        yield f"{path}:1: expected at most {MAX_BYTES:,} bytes, got {len(content):,}"
    if b"\0" in content:
        yield f"{path}:1: expected text, got a binary file"
        return
    is_python = path.endswith(".py")
    is_test = is_python and Path(path).name.startswith("test_")
    for number, line in enumerate(content.decode().splitlines(), 1):
        for what, pattern in FORBIDDEN.items():
            if pattern.search(line):
                yield f"{path}:{number}: expected no {what}"
        if is_python and not line.isascii():
            yield f"{path}:{number}: expected ASCII"
        if is_test and (name := TEST.match(line)) and name[1].count("_") < 3:
            yield f"{path}:{number}: {name[1]}: expected a name of at least four words"


def check_links(path: str, text: str, root: Path) -> Iterator[str]:
    """Yields the links of a page to files that do not exist."""
    folder = (root / path).parent
    for number, line in enumerate(text.splitlines(), 1):
        for link in LINK.findall(line):
            if not (folder / link).exists():
                yield f"{path}:{number}: expected a file {link}; there is none"


def _name(requirement: str) -> str:
    return re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def imported(sources: Iterator[str]) -> set[str]:
    """Returns the requirements that install what these modules import."""
    found: set[str] = set()
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                found.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.split(".")[0])
    found -= {*sys.stdlib_module_names, *OPTIONAL, "fullshard"}
    return {DISTRIBUTIONS.get(name, name).replace("_", "-") for name in found}


def check_dependencies(project: dict, used: set[str], constraints: str) -> Iterator[str]:
    """Yields imports, declarations and pins that contradict each other."""
    extras = project["optional-dependencies"]

    def declared(groups: tuple[str, ...]) -> set[str]:
        lists = [project["dependencies"], *(extras[group] for group in groups)]
        return {_name(requirement) for one in lists for requirement in one} - {"fullshard"}

    pins = [line for line in constraints.splitlines() if line and not line.startswith("#")]
    for pin in pins:
        if not re.fullmatch(r"[\w.-]+==[\w.+]+", pin):
            yield f"constraints.txt: expected an exact pin, got {pin}"
    for name in sorted(used - declared(EXTRAS)):
        yield f"pyproject.toml: expected {name}, which src/ imports, among the dependencies"
    for name in sorted(declared(EXTRAS) - used):
        yield f"pyproject.toml: expected only imported dependencies, got {name}"
    for name in sorted(declared(tuple(extras)) - {_name(pin) for pin in pins}):
        yield f"constraints.txt: expected a pin of {name}"


def check_targets(makefile: str) -> Iterator[str]:
    """Yields phony targets without a line of help, and lines of help without a target."""
    phony = re.search(r"^\.PHONY:(.*)$", makefile, re.M)
    targets = set(phony[1].split()) - {"help"} if phony else set()
    for name in sorted(targets ^ set(re.findall(r'^\t@echo "make ([a-z-]+)', makefile, re.M))):
        yield f"Makefile: expected {name} as a phony target and in the help"


def main(root: Path) -> int:
    """Checks all files that git tracks; returns 1 if something is wrong."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, stdout=-1, check=True).stdout
    names = [name for name in listed.decode().split("\0") if name and (root / name).is_file()]
    texts = {name: (root / name).read_bytes() for name in names}
    found = [line for name in names for line in check_file(name, texts[name])]
    for name in names:
        if name.endswith(".md"):
            found += check_links(name, texts[name].decode(), root)
    project = tomllib.loads(texts["pyproject.toml"].decode())["project"]
    modules = (
        texts[name].decode() for name in names if name.startswith("src/") and name.endswith(".py")
    )
    pins = texts["constraints.txt"].decode()
    found += check_dependencies(project, imported(modules), pins)
    found += check_targets(texts["Makefile"].decode())
    if not readme_table.PLACE.search(texts["README.md"].decode()):
        found.append("README.md: expected marks for results, as tools/readme_table.py says.")
    if readme_table.filled(readme := texts["README.md"].decode(), root) != readme:
        found.append("README.md: expected the committed results. Run tools/readme_table.py.")
    print(f"  {len(names)} files checked, {len(found)} findings")
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent))
