"""One save at a time: on a thread of its own, or here."""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from fullshard.errors import CheckpointError, FullshardError, OutOfMemoryError, ran_out_of_memory

logger = logging.getLogger(__name__)


class Saves:
    """The saves of this process, of which at most one is under way.

    It also holds this process's claim on the folders that it saves steps into: a second run there
    would count and remove the first one's checkpoints.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: FullshardError | None = None
        self._claims: dict[Path, int] = {}
        self._at_exit_set = False

    @property
    def under_way(self) -> bool:
        """Whether a save is being written."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], None]) -> None:
        """Run `work` on a thread; its error comes out of the next call of `wait`."""
        self.wait()

        def run() -> None:
            try:
                work()
            except FullshardError as error:
                self._error = error
            except Exception as error:  # noqa: BLE001  whatever it is, the caller must hear of it
                kind = OutOfMemoryError if ran_out_of_memory(error) else CheckpointError
                self._error = kind(f"saving: {type(error).__name__}: {error}")
                self._error.__cause__ = error

        self._thread = threading.Thread(target=run, name="fullshard-save", daemon=True)
        if not self._at_exit_set:
            self._at_exit_set = True
            atexit.register(self._at_exit)
        self._thread.start()

    def check(self) -> None:
        """Raise what a save that has ended has to say; does not wait.

        Raises:
            FullshardError: It failed: CheckpointError, or OutOfMemoryError.
        """
        if not self.under_way:
            self.wait()

    def wait(self) -> None:
        """Return when no save is under way.

        Raises:
            FullshardError: The last one failed: CheckpointError, or OutOfMemoryError.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def claim_folder(self, folder: Path) -> None:
        """Be the only process that saves steps into a folder, until this one ends.

        Raises:
            CheckpointError: Another process does; or there can be no such folder.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            key = folder.resolve()
            if key in self._claims:
                return
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint '{folder}': expected a folder to write into; {error.strerror}. "
                "Name another."
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise CheckpointError(
                f"checkpoint '{folder}': expected a folder of one run; another process saves its "
                "steps there. Name another folder, or end that run."
            ) from error
        except OSError:  # a file system without locks: nothing can be said
            pass
        self._claims[key] = descriptor

    def _at_exit(self) -> None:
        try:
            self.wait()
        except FullshardError as error:
            logger.error("%s", error)
            sys.stdout.flush()
            os._exit(error.exit_code)  # nothing else lets an exit handler say so
