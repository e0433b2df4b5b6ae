"""Places of checkpoints: folders, and object stores through fsspec.

    runs/a/checkpoints      a folder: files are synced, and renamed into place
    s3://bucket/run-a       a store: objects appear whole when they are closed; nothing is renamed
    memory://run-a          a store in the memory of one process

Everything that a checkpoint needs of a store is here. Paths of stores are pathlib's, so all code
that names, lists and reads files is the same for both.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from functools import cache
from glob import escape
from os import PathLike
from pathlib import Path, PosixPath
from stat import S_IFDIR, S_IFREG
from typing import Any, Self

from fullshard.config.regular_files import open_regular, read_regular
from fullshard.config.values import nearest
from fullshard.errors import CheckpointError

PAUSES_S = (0.1, 0.4, 1.6, 6.4)  # before a failed request is made again
FINAL = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)
_URL = re.compile(r"([a-z][a-z0-9+.-]+):(/+)(.*)", re.DOTALL | re.IGNORECASE)  # pathlib: one slash


def storage_path(path: str | PathLike[str]) -> Path:
    """A path of a folder or, for a URL, of a store; `file://` is a folder.

    Raises:
        CheckpointError: It is no path.
    """
    if isinstance(path, StorePath):
        return path
    try:
        match = _URL.fullmatch(os.fspath(path))
    except TypeError:
        raise CheckpointError(
            f"checkpoint: expected the path of a folder or a store, got {type(path).__name__}. The "
            "order is fs.save(folder, model, optimizer), and the same for fs.load."
        ) from None
    if match is None or (match[2] == "/" and Path(f"{match[1]}:").exists()):
        return Path(path)
    protocol = match[1].lower()
    return Path("/", match[3]) if protocol == "file" else StorePath(f"{protocol}:", match[3])


class StorePath(PosixPath):
    """A name in an object store.

    Requests that fail are retried a few times. Ranks read notes of other ranks in the store, so one
    lost response must not leave them waiting. Errors of the store's library that are no
    OSError become one.
    """

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def ask(self, method: str, *args: Any, name: str | None = None, **settings: Any) -> Any:
        """Calls a method of the store with this name, or with a pattern for it."""
        if len(self.parts) < 2:  # a protocol without a path, or nothing
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        call = getattr(_store(self.parts[0].rstrip(":")), method)
        for pause in (*PAUSES_S, None):
            try:
                with _as_os_error(self):
                    return call(name or str(self), *args, **settings)
            except OSError as error:
                if pause is None or isinstance(error, FINAL):
                    raise
                time.sleep(pause)
        raise AssertionError

    def resolve(self, strict: bool = False) -> Self:  # noqa: ARG002, FBT001, FBT002
        return self

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:  # noqa: ARG002
        facts = self.ask("info")
        mode = S_IFREG if facts["type"] == "file" else S_IFDIR
        return os.stat_result((mode, 0, 0, 1, 0, 0, facts["size"] or 0, 0, 0, 0))

    def exists(self, **_: Any) -> bool:
        return self._kind() is not None

    def is_file(self, **_: Any) -> bool:
        return self._kind() == "file"

    def is_dir(self, **_: Any) -> bool:
        return self._kind() == "directory"

    def _kind(self) -> str | None:
        """None if there is no such name; fsspec's own functions treat any failure as that."""
        try:
            return self.ask("info")["type"]
        except FileNotFoundError:
            return None

    def is_symlink(self) -> bool:
        return False

    def iterdir(self) -> Generator[Self]:
        own = str(self).partition("://")[2].strip("/")
        names = {name.strip("/") for name in self.ask("ls", detail=False)}
        yield from (self / name.rpartition("/")[2] for name in sorted(names - {own}))

    def glob(self, pattern: str, **_: Any) -> Generator[Self]:
        with suppress(FileNotFoundError):
            yield from (path for path in self.iterdir() if fnmatch(path.name, pattern))

    def read_bytes(self) -> bytes:
        return self.ask("cat_file")

    def read_text(self, *_: Any, **__: Any) -> str:
        return self.read_bytes().decode()

    def write_bytes(self, data: Any) -> int:
        self.ask("pipe_file", bytes(data))
        return len(data)

    def mkdir(self, *_: Any, **__: Any) -> None:
        """Nothing: the folders of a store are the beginnings of names."""

    def unlink(self, missing_ok: bool = False) -> None:  # noqa: FBT001, FBT002
        try:
            self.ask("rm_file")
        except FileNotFoundError:
            if not missing_ok:
                raise


@cache
def _store(protocol: str) -> Any:
    """fsspec's file system of a protocol; it lists again each time, as other ranks write too."""
    try:
        import fsspec  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:
        raise CheckpointError(
            f"{protocol}://: expected fsspec, which opens such stores; it is not installed. Run "
            "`pip install 'fullshard[stores]'`, or use a local folder."
        ) from error
    try:
        library: Any = fsspec
        return library.filesystem(protocol, use_listings_cache=False)
    except ImportError as error:  # it names the package
        raise CheckpointError(f"{protocol}://: {error}. Or use a local folder.") from error
    except Exception as error:
        if protocol in fsspec.available_protocols():
            raise CheckpointError(
                f"{protocol}://: expected a store that opens; got {type(error).__name__}: {error}. "
                "Configure its account or host for fsspec (~/.config/fsspec, environment)."
            ) from error
        close = nearest(protocol, fsspec.available_protocols())
        raise CheckpointError(
            f"{protocol}://: expected a protocol that fsspec knows, got {protocol!r}. "
            f"{f'Did you mean {close}?' if close else 'Name a folder.'}"
        ) from error


@contextmanager
def _as_os_error(path: Path) -> Generator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", str(path)) from error


def does_not_answer(path: Path, error: Exception) -> bool:
    """Whether a store failed to list its contents, which is not a fault of the checkpoint."""
    asked: BaseException | None = error if isinstance(error, OSError) else error.__cause__
    is_failure = isinstance(asked, OSError) and not isinstance(asked, FileNotFoundError)
    return isinstance(path, StorePath) and is_failure


def read_file(path: Path) -> bytes:
    """Content of a small file.

    Raises:
        OSError: It is missing, not regular, or too large.
    """
    return path.read_bytes() if isinstance(path, StorePath) else read_regular(path)


def sizes_in(folder: Path) -> dict[str, int]:
    """Sizes of the regular files of a folder, by name; of a store by one listing."""
    if isinstance(folder, StorePath):
        with suppress(FileNotFoundError):
            rows: list[dict[str, Any]] = folder.ask("ls", detail=True)
            return {r["name"].rpartition("/")[2]: r["size"] for r in rows if r["type"] == "file"}
        return {}
    with os.scandir(folder) as entries:
        return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}


def remove_tree(path: Path) -> None:
    """Remove a folder and its contents; files that cannot be removed stay."""
    if isinstance(path, StorePath):
        with suppress(OSError):
            path.ask("rm", name=escape(str(path)), recursive=True)  # it expands patterns
    else:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def open_for_reading(path: Path) -> Generator[tuple[int, Callable[[memoryview, int], int]]]:
    """The size of a regular file, and a function that fills memory from an offset.

    The function returns the number of bytes, which is smaller at the end of the file.
    """
    if isinstance(path, StorePath):
        whole = path.stat().st_size

        def read(out: memoryview, offset: int) -> int:
            stop = min(whole, offset + out.nbytes)
            if offset >= stop:
                return 0  # stores refuse a range that begins at the end
            data = path.ask("cat_file", start=offset, end=stop)
            out[: len(data)] = data
            return len(data)

        yield whole, read
        return
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        yield size, lambda out, offset: os.preadv(descriptor, [out], offset)
    finally:
        os.close(descriptor)


@contextmanager
def new_object(path: StorePath) -> Generator[Callable[[memoryview], Any]]:
    """A function that appends to a new object, which appears at the end of the block."""
    file = path.ask("open", "wb")
    try:
        with _as_os_error(path):
            yield file.write
    except BaseException:
        with suppress(Exception):
            file.discard()  # the parts that were sent
        with suppress(AttributeError):
            file.closed = True  # otherwise the garbage collector closes it, which publishes a part
        raise
    with _as_os_error(path):
        file.close()
