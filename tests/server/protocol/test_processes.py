"""Configurations of processes."""

from __future__ import annotations

import pytest

from server.protocol.control import EngineConfig, check_version, code_digest
from server.protocol.messages import VERSION


def test_a_process_of_another_version_says_so_and_ends() -> None:
    check_version(EngineConfig("{}", "inproc://engine", 1))
    with pytest.raises(SystemExit, match=r"error: a server of version 0\.0\.0 started a process of version"):
        check_version(EngineConfig("{}", "inproc://engine", 1, version="0.0.0"))


def test_an_engine_of_another_python_with_other_code_says_how_to_install_the_same() -> None:
    check_version(EngineConfig("{}", "inproc://engine", 1, code=code_digest()))
    with pytest.raises(SystemExit) as ended:
        check_version(EngineConfig("{}", "inproc://engine", 1, code="0" * 64))
    assert f"with code {code_digest()[:12]}, and the server is {VERSION} with code 000000000000" in str(
        ended.value
    )
    with pytest.raises(
        SystemExit, match=r"the server is 0\.0\.0 with code .*`.* -m pip install --force-reinstall"
    ):
        check_version(EngineConfig("{}", "inproc://engine", 1, version="0.0.0", code=code_digest()))
