"""Programs of Debian's packages that tests run, and packages of Python's that they may lack."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest


def debian_tool(name: str, target: str = "packages") -> str:
    """Return the path of a program. If its package is not installed, skip the test; in CI, fail."""
    return shutil.which(name) or missing(name, target)


def missing(name: str, target: str = "packages") -> NoReturn:
    """Skip a test that needs a program which a target of the Makefile has not installed; in CI, fail."""
    _skip(f"{name} is not installed: run `make {target}` as root")


def missing_package(name: str) -> NoReturn:
    """Skip a test that needs a package of the extra `test` which is not installed; in CI, fail."""
    _skip(f"{name} is not installed: pip install 'peraxis[test]'")


def _skip(reason: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
