"""Fixtures of configuration tests."""

import json
from pathlib import Path

import pytest

from fullshard.config.files import parse_text
from fullshard.config.load import load_config
from fullshard.errors import ConfigError


@pytest.fixture
def load_file(tmp_path, monkeypatch):
    """`load_file(text, *overrides)` loads a file with that text; several texts, several files."""
    monkeypatch.chdir(tmp_path)

    def load(texts, *overrides, name="a.yaml", **how):
        paths = []
        for number, text in enumerate([texts] if isinstance(texts, str) else texts):
            paths.append(Path(name if not number else f"{number}{name}"))
            paths[-1].write_text(text)
        return load_config(paths, overrides, **how)

    return load


@pytest.fixture
def check_error(snapshot, load_file):
    """Compares a file's error with this text, word for word, and checks exit code 2."""

    def check(name, text, *, needs_model):
        with pytest.raises(ConfigError) as caught:
            load_file(text, name=name, needs_model=needs_model)
        assert f"{text}\n--> {caught.value}" == snapshot
        assert caught.value.exit_code == 2

    return check


@pytest.fixture
def configured():
    """Returns the configuration of a file with these keys; `model` has a default."""

    def load(**keys):
        text = json.dumps({"model": "x", **keys})
        return load_config(parse_text(text, "train.yaml")).config

    return load
