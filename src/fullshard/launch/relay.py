"""Copies rank 0's output to the user's terminal and, cleaned, into its log.

    rank 0  --stdout, stderr-->  pty, or a pipe where ours is none  -->  our stdout, stderr
                                                                    `->  logs/rank_0.log

With a pty the rank sees a terminal of the right size, so progress bars work. The log gets the final
text: no colours, no overwritten lines.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import selectors
import termios
import threading
import tty
from pathlib import Path
from typing import BinaryIO

logger = logging.getLogger(__name__)

_ESCAPES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
_CHUNK_BYTES = 65536
_RESIZE_S = 0.5
_LONGEST_LINE = 1 << 20  # a longer one is cut


class LineCleaner:
    """Turns a stream for terminals into lines for a file."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> bytes:
        """The lines that `data` completes, as they looked when they were complete."""
        *ended, rest = data.split(b"\n")
        done = bytearray()
        for end in ended:
            self._rest += end
            done += self._line()
        self._rest += rest
        return bytes(done + self._line() if len(self._rest) > _LONGEST_LINE else done)

    def finish(self) -> bytes:
        """What is left of a line without an end."""
        line = self._line()
        return b"" if line == b"\n" else line

    def _line(self) -> bytes:
        plain = _ESCAPES.sub(b"", self._rest).rstrip(b"\r")
        self._rest.clear()
        return bytes(plain.rpartition(b"\r")[2]) + b"\n"


class Relay:
    """One rank's output on its way. Lives as long as the launch; `close` after the rank's end."""

    def __init__(self, log: Path) -> None:
        self._log: BinaryIO = log.open("ab", buffering=0)
        self._targets: dict[int, int] = {}  # our reading end -> where it goes
        self._terminal: tuple[int, int] | None = None  # the pty's controlling end, our terminal
        self.muted = threading.Event()  # set: something more important is shown from now on
        self.stdout_fd = self._open(1)
        self.stderr_fd = self._open(2)
        self._thread = threading.Thread(target=self._copy, name="relay of rank 0", daemon=True)

    def start(self) -> None:
        """Begin to copy; call it once the rank holds its ends."""
        for fd in {self.stdout_fd, self.stderr_fd}:
            os.close(fd)  # else no end of file would ever come
        self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        """Wait until everything has been copied."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
            return
        self._log.close()  # no rank was started
        for fd in {self.stdout_fd, self.stderr_fd, *self._targets}:
            os.close(fd)

    def _open(self, target: int) -> int:
        """The rank's end of a new way to one of our streams; both share one pty, and its order."""
        if not os.isatty(target):
            reading, writing = os.pipe()
            self._targets[reading] = target
            return writing
        if self._terminal is not None:
            return self.stdout_fd
        reading, writing = os.openpty()
        tty.setraw(writing)  # our own terminal turns \n into \r\n already
        self._terminal = reading, target
        self._resize()
        self._targets[reading] = target
        return writing

    def _resize(self) -> None:
        if self._terminal is not None:
            pty, terminal = self._terminal
            with contextlib.suppress(termios.error):
                termios.tcsetwinsize(pty, termios.tcgetwinsize(terminal))

    def _copy(self) -> None:
        cleaners = {fd: LineCleaner() for fd in self._targets}
        with selectors.DefaultSelector() as selector, self._log:
            for fd in self._targets:
                selector.register(fd, selectors.EVENT_READ)
            while selector.get_map():
                self._resize()
                for key, _ in selector.select(_RESIZE_S):
                    data, cleaner = _read(key.fd), cleaners[key.fd]
                    self._write(cleaner.feed(data) if data else cleaner.finish())
                    if data:
                        self._show(key.fd, data)
                        continue
                    selector.unregister(key.fd)
                    os.close(key.fd)

    def _write(self, text: bytes) -> None:
        try:
            self._log.write(text)
        except OSError as error:  # a rank whose output nobody reads would wait without end
            logger.warning("%s ends here: %s", self._log.name, error.strerror)
            self._log = Path(os.devnull).open("wb", 0)  # noqa: SIM115

    def _show(self, fd: int, data: bytes) -> None:
        while data and not self.muted.is_set():
            try:
                data = data[os.write(self._targets[fd], data) :]
            except BlockingIOError:  # another program made our stream non-blocking
                select.select([], [self._targets[fd]], [], _RESIZE_S)
            except OSError:  # the reader is gone; the run and its log continue
                self.muted.set()


def _read(fd: int) -> bytes:
    """Like os.read; the end of a pty, which Linux calls an error, is an end of file."""
    try:
        return os.read(fd, _CHUNK_BYTES)
    except OSError:
        return b""
