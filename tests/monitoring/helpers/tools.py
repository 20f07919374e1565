"""Programs of Debian's packages that tests run."""

from __future__ import annotations

import shutil

import pytest


def debian_tool(name: str, package: str = "prometheus") -> str:
    """Return the path of a program; skip the test if its package is not installed."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed: apt-get install {package}")
    return path
