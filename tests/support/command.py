"""Runs `fullshard` in this process and captures its output and that of its children.

Ranks and references are forked from a server that has imported torch.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import forked


@dataclass(frozen=True)
class Done:
    """How a command ended, and the output of it and its ranks."""

    exit_code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The object that --json printed."""
        return json.loads(self.out)


def call(folder: Path, *words: object, code: int | None = None) -> Done:
    """Runs a command and checks its exit code; its output goes through files in `folder`."""
    from fullshard.cli.app import run

    with output_in(folder), forked.launching():
        exit_code = run([str(word) for word in words])
    done = Done(exit_code, (folder / "out").read_text(), (folder / "err").read_text())
    assert code in (None, exit_code), f"expected exit code {code}, got {exit_code}:\n{done.err}"
    assert "Exception in thread" not in done.out + done.err, done.err
    return done


@contextlib.contextmanager
def output_in(folder: Path) -> Iterator[None]:
    """Redirects the output of this process and its children to the files `out` and `err`."""
    saved = [os.dup(number) for number in (1, 2)]
    with contextlib.ExitStack() as stack:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(stack.enter_context((folder / name).open("w")).fileno(), number)
        # New streams, which follow the descriptor when the command moves it for --json.
        streams = [stack.enter_context(open(number, "w", closefd=False)) for number in (1, 2)]
        try:
            with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
                yield
        finally:
            for stream, number, old in zip(streams, (1, 2), saved, strict=True):
                stream.flush()
                os.dup2(old, number)
                os.close(old)
