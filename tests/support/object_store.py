"""An object store for tests: `objects://tmp/x` keeps its objects below the folder /tmp/x.

It supports only what object stores support. An object appears when it is closed, replaces an older
one atomically, and is read by ranges. There are no folders: a name acts as one while objects are
below it. Objects cannot be renamed, moved, copied or appended to.

Processes find it through the entry point in `support/plugins`, as they would find s3fs.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec
from fsspec.spec import AbstractFileSystem

PLUGINS = Path(__file__).with_name("plugins")
ON_REQUEST: list[Callable[[str, str], None]] = []  # called with each request and its name


@contextmanager
def at_request(number: int, do: Callable[[str, str], None]) -> Iterator[list[str]]:
    """Calls `do` before the `number`-th request is carried out; lists the requests."""
    made: list[str] = []

    def count(request: str, name: str) -> None:
        made.append(f"{request} {name}")
        if len(made) == number:
            do(request, name)

    ON_REQUEST.append(count)
    try:
        yield made
    finally:
        ON_REQUEST.remove(count)


def _ask(request: str, name: str) -> None:
    for hear in ON_REQUEST:
        hear(request, name)


class _Upload:
    """An object in flight."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  unnamed: a kill leaves nothing
        self.closed = False

    def write(self, data: Any) -> int:
        return self._file.write(data)

    def close(self) -> None:
        _ask("put", self._path)
        Path(self._path).parent.mkdir(parents=True, exist_ok=True)
        self._file.seek(0)
        aside = f"{self._path}.{os.getpid()}.upload"
        Path(aside).write_bytes(self._file.read())
        os.replace(aside, self._path)  # noqa: PTH105  how this double makes an object appear
        self.discard()

    def discard(self) -> None:
        self.closed = True
        self._file.close()

    def __enter__(self) -> _Upload:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ObjectStore(AbstractFileSystem):
    """The store that the module describes."""

    protocol = "objects"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return "/" + str(path).removeprefix("objects:").strip("/")

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        _ask("list", path)
        rows = self._rows(path)
        if not rows:
            raise FileNotFoundError(path)
        return rows if detail else [row["name"] for row in rows]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        _ask("head", path)
        if Path(path).is_file():
            return {"name": path, "size": Path(path).stat().st_size, "type": "file"}
        if self._rows(path):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **_: Any) -> bytes:
        path = self._strip_protocol(path)
        _ask("get", path)
        data = Path(path).read_bytes()
        if start is not None and start >= len(data):
            raise OSError(errno.EINVAL, "The requested range is not satisfiable")  # as S3 answers
        return data[start:end]

    def rm_file(self, path: str) -> None:
        path = self._strip_protocol(path)
        _ask("delete", path)
        Path(path).unlink(missing_ok=True)  # as in S3
        with suppress(OSError):
            os.removedirs(Path(path).parent)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        for name in self.find(path):
            self.rm_file(name)

    def _open(self, path: str, mode: str = "rb", *_: Any, **__: Any) -> Any:
        if mode != "wb":
            raise NotImplementedError(f"object stores have no {mode!r}")
        return _Upload(path)

    def _rows(self, path: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        with suppress(FileNotFoundError, NotADirectoryError):
            for entry in os.scandir(path):
                if entry.is_dir():
                    rows.append({"name": entry.path, "size": 0, "type": "directory"})
                elif not entry.name.endswith(".upload"):
                    with suppress(FileNotFoundError):
                        size = entry.stat().st_size
                        rows.append({"name": entry.path, "size": size, "type": "file"})
        return rows

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        raise NotImplementedError("this store copies nothing")

    def mv(self, path1: str, path2: str, *_: Any, **__: Any) -> None:
        raise NotImplementedError("object stores rename nothing")

    rename = move = mv


fsspec.register_implementation("objects", ObjectStore, clobber=True)
