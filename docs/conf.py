"""Configuration of the documentation: `make docs` builds it, and every warning is an error."""

from __future__ import annotations

import re
from pathlib import Path
from shutil import copytree

from sphinx.application import Sphinx

_SOURCE = Path(__file__).parents[1] / "src" / "fullshard" / "__init__.py"
_VERSION = re.search(r'^__version__ = "(.+)"$', _SOURCE.read_text(), re.M)
assert _VERSION, f"no __version__ in {_SOURCE}"

project = "fullshard"
author = project_copyright = "fullshard developers"
version = release = _VERSION[1]

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
nitpicky = True
myst_heading_anchors = 3

html_theme = "furo"
html_title = "fullshard"


def setup(app: Sphinx) -> None:
    """Copy what pages show by `<picture>`, which Sphinx does not see."""
    images = Path(__file__).parent / "images"
    app.connect(
        "build-finished", lambda *_: copytree(images, app.outdir / "images", dirs_exist_ok=True)
    )
