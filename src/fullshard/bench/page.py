"""The result of a measurement as one JSON object and one Markdown page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fullshard.bench.machine import IDLE_SHARE
from fullshard.launch.machine import describe_machine, describe_versions

SCHEMA_VERSION = 1


def provenance(
    machine: Mapping[str, object], versions: Mapping[str, str], command: str
) -> list[str]:
    """Returns the lines that say where figures come from."""
    return [
        *(f"- {name}: {value}" for name, value in machine.items()),
        "- " + ", ".join(f"{name} {value}" for name, value in versions.items()),
        f"- command: `{command}`",
        "",
    ]


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a Markdown table."""
    ruler = ["---"] * len(columns)
    return ["| " + " | ".join(cells) + " |" for cells in (columns, ruler, *rows)]


@dataclass(frozen=True)
class Page:
    """What one run of a command found.

    Attributes:
        name: of the files: `comm` gives comm.json and comm.md.
        rows: for programs, one a figure.
        columns: of the table for people.
        cells: of that table.
        method: how it was measured, in sentences.
        others_share: share of all cores that other processes used meanwhile.
        became_idle: False if --wait gave up.
        absent: what could not be measured, and why.
        notes: sentences under the table.
        drawings: SVG by file name.
    """

    name: str
    title: str
    command: str
    rows: Sequence[Mapping[str, object]]
    columns: Sequence[str]
    cells: Sequence[Sequence[str]]
    method: Sequence[str]
    others_share: float
    became_idle: bool = True
    absent: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    drawings: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, object] = field(default_factory=describe_machine)
    versions: Mapping[str, str] = field(
        default_factory=lambda: describe_versions(("fullshard", "torch"))
    )

    @property
    def loaded(self) -> bool:
        """Whether other processes used the machine meanwhile."""
        return not self.became_idle or self.others_share >= IDLE_SHARE

    def to_dict(self) -> dict[str, object]:
        """Returns the object that `--json` prints and `--out` keeps."""
        return {
            "schema_version": SCHEMA_VERSION,
            "rows": [{**row, "loaded": self.loaded} for row in self.rows],
            "absent": list(self.absent),
            "why_absent": dict(self.absent),
            "others_share": self.others_share,
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "command": self.command,
            "method": list(self.method),
        }

    def to_markdown(self) -> str:
        """Returns the page for people."""
        state = "LOADED" if self.loaded else "idle"
        lines = [f"# {self.title}", ""]
        lines += provenance(self.machine, self.versions, self.command)
        lines += [*table_lines(self.columns, self.cells), ""]
        sentences = [f"Absent: {name}. {why}" for name, why in self.absent.items()]
        others = f"Other processes used {self.others_share:.0%} of the cores meanwhile: {state}."
        for sentence in (*sentences, *self.notes, others):
            lines += [sentence, ""]
        lines += ["## Method", "", *(f"- {sentence}" for sentence in self.method)]
        return "\n".join(lines) + "\n"

    def write(self, folder: Path) -> None:
        """Writes the object, the page and the drawings."""
        folder.mkdir(parents=True, exist_ok=True)
        files = {
            f"{self.name}.json": json.dumps(self.to_dict(), indent=1) + "\n",
            f"{self.name}.md": self.to_markdown(),
            **self.drawings,
        }
        for name, text in files.items():
            (folder / name).write_text(text)
