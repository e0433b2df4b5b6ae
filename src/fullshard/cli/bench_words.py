"""What the commands of `fullshard bench` share."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fullshard.cli.outcome import Outcome

if TYPE_CHECKING:
    from fullshard.bench.page import Page

WaitFlag = Annotated[
    bool, typer.Option("--wait", help="Wait up to ten minutes for idle neighbours.")
]
OutFlag = Annotated[
    Path | None, typer.Option(help="Folder for the results' JSON and page.", file_okay=False)
]


def say(text: str) -> None:
    """To people, whatever --json prints."""
    print(text, file=sys.stderr, flush=True)


def show(page: Page, out: Path | None) -> Outcome:
    """Print a page, and write it where that is asked for."""
    if out is not None:
        page.write(out)
    print(page.to_markdown())
    return Outcome(page.to_dict())


def command_line(name: str) -> str:
    """As it was typed, for a page."""
    words = sys.argv[1:]
    return shlex.join(["fullshard", *([] if words[:1] == ["bench"] else ["bench", name]), *words])
