"""What many tests share: tiny artifacts, and one server that runs for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tests.interpreter  # noqa: F401 - before anything imports Triton
from tests.live_server import Artifacts, LiveServer, live_server, make_artifacts


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Artifacts:
    return make_artifacts(tmp_path_factory.mktemp("artifacts"))


@pytest.fixture(scope="session")
def server(artifacts: Artifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Tests use variants of their own names on it, so that they do not meet."""
    registry = tmp_path_factory.mktemp("served") / "registry"
    with live_server(artifacts.base, registry, "--max-gpu-deltas", 4, "--max-upload-gb", 1) as running:
        for name in ("plain", "chatty", "third"):
            assert running.upload(name, getattr(artifacts, name)).status_code == 201
        yield running
