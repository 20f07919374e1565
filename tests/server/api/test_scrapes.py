"""The registry as an HTTP process reads it for scrapes, also on a file system that hangs."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from deltastore.registry import Registry
from deltastore.registry.records import Usage
from server.metrics import exposition
from server.metrics.exposition import RegistryScrapes
from server.registry_calls import RegistryCalls
from tests.deltastore.helpers.crash_storage import artifact, push


class CountingRegistry(Registry):
    """A registry whose count does not answer while `answers` is not set."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.answers = threading.Event()
        self.num_counts = 0

    def usage(self) -> Usage:
        self.num_counts += 1
        self.answers.wait()
        return super().usage()


def test_a_registry_that_hangs_delays_scrapes_shortly_and_takes_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exposition, "READ_S", 0.05)
    registry = CountingRegistry(tmp_path / "registry")

    async def main() -> None:
        reader = RegistryScrapes(registry, RegistryCalls("registry", lambda: None))
        for _ in range(3):
            assert await reader.read(frozenset()) is None
        assert registry.num_counts == 1
        registry.answers.set()
        while await reader.read(frozenset()) is None:
            await asyncio.sleep(0.01)

    asyncio.run(main())


def test_the_bytes_are_counted_once_in_a_while_and_the_versions_at_each_scrape(tmp_path: Path) -> None:
    registry = CountingRegistry(tmp_path / "registry")
    registry.answers.set()

    async def main() -> None:
        reader = RegistryScrapes(registry, RegistryCalls("registry", lambda: None))
        for number in (1, 2):
            push(registry, artifact(number), "v")
            state = await reader.read(frozenset({"default/v"}))
            assert state is not None
            assert (state.active, state.usage.num_objects) == ({"default/v": number}, 1)
        assert registry.num_counts == 1

    asyncio.run(main())
