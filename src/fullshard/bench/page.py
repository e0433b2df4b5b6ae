"""The result of a measurement as one JSON object and one Markdown page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fullshard.bench.machine import IDLE_SHARE
from fullshard.launch.machine import describe_machine, describe_versions

SCHEMA_VERSION = 1


def is_loaded(others_share: float, *, became_idle: bool) -> bool:
    """Returns whether other processes used the machine too much for figures to count."""
    return not became_idle or others_share >= IDLE_SHARE


def busy_sentence(others_share: float, *, became_idle: bool) -> str:
    """Says how much other processes used the machine."""
    state = "LOADED" if is_loaded(others_share, became_idle=became_idle) else "idle"
    return f"Other processes used {others_share:.0%} of the cores meanwhile: {state}."


@dataclass(frozen=True)
class Page:
    """The result of one run of a command.

    Attributes:
        name: Stem of the files: `comm` gives comm.json and comm.md.
        rows: Rows of the JSON object.
        columns: Headings of the table.
        cells: Rows of the table.
        method: How the figures were measured, in sentences.
        others_share: Share of all cores that other processes used meanwhile.
        became_idle: False if --wait gave up.
        absent: What could not be measured, with the reason.
        notes: Sentences under the table.
        drawings: SVG files by name.
        more: Further members of the JSON object.
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
    more: Mapping[str, object] = field(default_factory=dict)

    @property
    def loaded(self) -> bool:
        """Whether other processes used the machine meanwhile."""
        return is_loaded(self.others_share, became_idle=self.became_idle)

    def to_dict(self) -> dict[str, object]:
        """Returns the object that `--json` prints and `--out` keeps."""
        return {
            "schema_version": SCHEMA_VERSION,
            "rows": [{"loaded": self.loaded, **row} for row in self.rows],
            "absent": list(self.absent),
            "why_absent": dict(self.absent),
            "others_share": self.others_share,
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "command": self.command,
            "method": list(self.method),
            **self.more,
        }

    def to_markdown(self) -> str:
        """Returns the page for people."""
        versions = ", ".join(f"{name} {value}" for name, value in self.versions.items())
        lines = [f"# {self.title}", ""]
        lines += [f"- {name}: {value}" for name, value in self.machine.items()]
        lines += [f"- {versions}", f"- command: `{self.command}`", ""]
        table = (self.columns, ["---"] * len(self.columns), *self.cells)
        lines += ["| " + " | ".join(cells) + " |" for cells in table]
        lines.append("")
        absent = [f"Absent: {name}. {why}" for name, why in self.absent.items()]
        busy = busy_sentence(self.others_share, became_idle=self.became_idle)
        for sentence in (*absent, *self.notes, busy):
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
