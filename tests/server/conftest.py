"""Engine tests run against the native engine, on a thread and in a process of its own, and against vLLM."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.helpers.served import sharing_engines
from tests.vllm.helpers.environment import NEEDS_VLLM


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give `mode` all values, or only the thread to a test that reaches into the engine."""
    if "mode" in metafunc.fixturenames:
        reaches_in = {"monkeypatch", "caplog"} & set(metafunc.fixturenames)
        vllm = pytest.param("vllm", marks=NEEDS_VLLM)
        metafunc.parametrize("mode", ["thread"] if reaches_in else ["thread", "process", vllm])


@pytest.fixture(scope="module", autouse=True)
def shared_engines() -> Iterator[None]:
    """End the engines of a module's tests with it."""
    with sharing_engines():
        yield
