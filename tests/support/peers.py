"""Installs packages that `make setup` does not, for the tests that need them."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

LIGHTNING = ("lightning==2.6.6", "lightning-utilities==0.15.3", "torchmetrics==1.9.0")
FOLDER = Path(__file__).parents[2] / "build" / "peers"


def with_site(*requirements: str) -> dict[str, str]:
    """Returns an environment in which Python finds these packages."""
    path = [str(site_of(*requirements)), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def site_of(*requirements: str) -> Path:
    """Returns a folder for PYTHONPATH with these packages, without their dependencies.

    The test is skipped, with pip's error, where the package index does not offer them.
    """
    folder = FOLDER / hashlib.sha256(" ".join(requirements).encode()).hexdigest()[:12]
    if not (folder / "complete").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
        command += ["--disable-pip-version-check", "--target", str(folder), *requirements]
        try:
            subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            reason = f"{type(error).__name__} {error.stderr}"[-500:]
            pytest.skip(f"cannot install {' '.join(requirements)}: {reason}")
        (folder / "complete").touch()
    return folder
