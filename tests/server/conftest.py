"""Engine tests run against an engine on a thread and against one in a process of its own."""

from __future__ import annotations

import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give `mode` both values, or only the thread to a test that reaches into the engine."""
    if "mode" in metafunc.fixturenames:
        reaches_in = {"monkeypatch", "caplog"} & set(metafunc.fixturenames)
        metafunc.parametrize("mode", ["thread"] if reaches_in else ["thread", "process"])
