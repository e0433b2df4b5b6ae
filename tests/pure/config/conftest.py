"""What tests of the configuration share."""

import json

import pytest

from fullshard.config.files import parse_text
from fullshard.config.load import load_config
from fullshard.errors import ConfigError


@pytest.fixture
def check_error(snapshot, tmp_path, monkeypatch):
    """Compares the error of a file with this text, word for word; its exit code is 2."""

    def check(name, text, *, needs_model):
        monkeypatch.chdir(tmp_path)
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_config(path.relative_to(tmp_path), needs_model=needs_model)
        assert f"{text}\n--> {caught.value}" == snapshot
        assert caught.value.exit_code == 2

    return check


@pytest.fixture
def configured():
    """The configuration of a file with these keys; `model` may be left out."""

    def load(**keys):
        text = json.dumps({"model": "x", **keys})
        return load_config(parse_text(text, "train.yaml")).config

    return load
