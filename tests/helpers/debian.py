"""Programs of Debian's packages that tests run."""

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
    reason = f"{name} is not installed: run `make {target}` as root"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
