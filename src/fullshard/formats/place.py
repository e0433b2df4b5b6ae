"""A folder that is there as a whole, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from fullshard.checkpoint.commit import failure
from fullshard.checkpoint.files import sync_folder
from fullshard.errors import CheckpointError


def check_empty(folder: Path, what: str) -> None:
    """Raises CheckpointError where a folder is there and holds something."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(
            f"{what}: expected a new or empty folder; '{folder}' holds something. Name another."
        )


@contextmanager
def whole_or_nothing(folder: Path) -> Generator[Path]:
    """A folder aside, which gets its name when the block ends well, and is gone when it does not.

    Raises:
        CheckpointError: The file system refused.
    """
    aside = folder.with_name(f".{folder.name}.exporting-{os.getpid()}")
    try:
        aside.mkdir(parents=True)
        yield aside
        sync_folder(aside)
        if folder.exists():
            folder.rmdir()
        aside.rename(folder)
    except OSError as error:
        raise failure(folder, 0, error) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
