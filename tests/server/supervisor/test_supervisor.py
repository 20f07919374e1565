"""The line that says where the server is, whatever the order in which its processes report."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from server.supervisor import supervisor as supervisor_module
from server.supervisor.supervisor import Supervisor
from tests.server.helpers.http_app import settings_of


class Client:
    """The supervisor's client of an engine that has not welcomed it."""

    def __init__(self) -> None:
        self.welcomed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.facts = SimpleNamespace(base=SimpleNamespace(id="a-base"))

    @property
    def has_facts(self) -> bool:
        return self.welcomed.done()


class Keeper:
    """A keeper that starts nothing; the last argument of its kind is what it reports to."""

    num_serving = 1

    def __init__(self, *arguments: Any) -> None:
        self.client, self.report = Client(), arguments[-1]
        Keeper.last = self

    last: Keeper

    async def run(self) -> None:
        await asyncio.Event().wait()

    def drain(self) -> None:
        pass


def test_a_server_whose_http_process_is_ready_before_its_supervisor_is_announced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor_module, "EngineKeeper", Keeper)
    monkeypatch.setattr(supervisor_module, "HttpKeeper", Keeper)
    settings = settings_of(tmp_path, tmp_path / "registry", shutdown_timeout=0.01)

    async def main(listening: socket.socket) -> None:
        supervisor = Supervisor(settings, [listening], tmp_path, tmp_path)
        http, engine = Keeper.last, supervisor._engine
        http.report()
        await asyncio.sleep(0)
        assert not capsys.readouterr().out
        engine.client.welcomed.set_result(None)  # type: ignore[arg-type]
        http.report()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert capsys.readouterr().out.startswith("a-base is served at http://")
        monkeypatch.setattr(supervisor_module, "LAST_BYTES_S", 0.0)
        await supervisor.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        asyncio.run(main(listening))
    assert not capsys.readouterr().out
