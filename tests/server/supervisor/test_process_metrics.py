"""Metrics of a server whose registry lies on a file system that hangs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from deltastore.registry import Registry
from deltastore.registry.reports import Usage
from server.errors import EngineRestarted
from server.frontend.engine_client import EngineClient
from server.metrics.snapshot import Snapshot
from server.supervisor import process_metrics
from server.supervisor.process_metrics import ProcessMetrics
from server.volume.calls import RegistryCalls


class HangingRegistry(Registry):
    """A registry whose files do not answer until `answers` is set."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.answers = threading.Event()
        self.num_asked = 0

    def usage(self) -> Usage:
        self.num_asked += 1
        self.answers.wait()
        return super().usage()


class AbsentEngine(EngineClient):
    """The client of an engine that has not started."""

    def __init__(self) -> None:
        pass

    async def metrics(self) -> Snapshot:
        raise EngineRestarted("there is no engine")

    def forget_variants(self, labels: frozenset[str]) -> None:
        pass


def test_a_registry_that_hangs_delays_scrapes_shortly_and_takes_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_metrics, "COLLECT_S", 0.05)
    registry = HangingRegistry(tmp_path / "registry")

    async def no_http(timeout_s: float) -> Mapping[str, Snapshot]:
        return {}

    async def scrapes() -> None:
        metrics = ProcessMetrics(registry, RegistryCalls("registry", registry.usage), AbsentEngine())
        for _ in range(3):
            assert b"peraxis_registry_up 0.0" in await metrics.exposition(no_http, True)
        assert registry.num_asked == 1
        registry.answers.set()
        while b"peraxis_registry_up 1.0" not in await metrics.exposition(no_http, True):
            await asyncio.sleep(0.01)

    asyncio.run(scrapes())
