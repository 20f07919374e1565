"""Configurations of processes."""

from __future__ import annotations

import pytest

from server.protocol.control import EngineConfig, check_version


def test_a_process_of_another_version_says_so_and_ends() -> None:
    check_version(EngineConfig("{}", "inproc://engine", 1))
    with pytest.raises(SystemExit, match=r"error: a server of version 0\.0\.0 started a process of version"):
        check_version(EngineConfig("{}", "inproc://engine", 1, version="0.0.0"))
