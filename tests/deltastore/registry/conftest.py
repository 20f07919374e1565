"""Directories of the tests that interrupt changes of a registry."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deltastore.helpers.crash_storage import make_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A registry with every kind of file; each test changes a copy."""
    root = tmp_path_factory.mktemp("world") / "registry"
    make_world(root)
    return root


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory if the system has one, because these tests create many thousands of small files."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        yield Path(directory)
