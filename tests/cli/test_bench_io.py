"""`fullshard bench io` in folders where it cannot write."""

from pathlib import Path

import pytest

from fullshard.cli.bench import io
from fullshard.errors import ConfigError, WillNotFitError


def test_a_full_or_unwritable_folder_is_refused_before_the_start(tmp_path):
    with pytest.raises(ConfigError, match="--place: expected a folder to write to"):
        io(Path("/proc"))
    with pytest.raises(WillNotFitError, match="--mib: expected at most"):
        io(tmp_path, mib=1 << 50)
    assert not list(tmp_path.iterdir())
