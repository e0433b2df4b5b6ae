"""`fullshard` called in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.command import Done, call


@pytest.fixture
def fullshard(tmp_path_factory) -> Callable[..., Done]:
    """`fullshard("ckpt", "ls", folder)` runs the command in this process."""
    return lambda *words: call(tmp_path_factory.mktemp("output"), *words)
