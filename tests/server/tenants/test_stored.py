"""Counts of what tenants store: shared listings, one at a time, and what this process has published and deleted."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from deltastore.registry import Registry
from deltastore.registry.reader import Stored
from deltastore.registry.records import ReportFile
from server.registry_calls import RegistryCalls
from server.tenants import stored as stored_module
from server.tenants.stored import StoredCounts

TENANT = "acme"


@pytest.fixture(autouse=True)
def counts_stay_recent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count anew only where a test asks for it, however slow this machine is."""
    monkeypatch.setattr(stored_module, "RECENT_S", 3600.0)


class FakeRegistry:
    """A registry whose listings wait until they are let go."""

    def __init__(self) -> None:
        self.files: list[ReportFile] = []
        self.num_listings = 0
        self.num_at_once = 0
        self.most_at_once = 0
        self.may_end = threading.Event()
        self.may_end.set()

    def stored(self, tenant: str, rest: Callable[[], None]) -> Stored:
        self.num_listings += 1
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        files = list(self.files)
        assert self.may_end.wait(60)
        self.num_at_once -= 1
        return Stored.of(files)

    def add(self, name: str, version: int, size_bytes: int = 10) -> str:
        file = ReportFile(name, version, f"{len(self.files):064x}", size_bytes, "0" * 32)
        self.files.append(file)
        return file.digest


def run(what: Callable[[FakeRegistry, StoredCounts], Awaitable[None]]) -> None:
    async def main() -> None:
        registry = FakeRegistry()
        calls = RegistryCalls("/registry", lambda: None)
        await what(registry, StoredCounts(registry, calls))  # type: ignore[arg-type]

    asyncio.run(main())


async def begun(registry: FakeRegistry, number: int) -> None:
    while registry.num_listings < number:
        await asyncio.sleep(0.001)


def test_heads_that_come_together_share_one_listing() -> None:
    async def what(registry: FakeRegistry, counts: StoredCounts) -> None:
        registry.add("a", 1)
        for _ in range(3):
            found = await asyncio.gather(*(counts.recent(TENANT) for _ in range(50)))
            assert {each.num_versions for each in found} == {1}
        assert registry.num_listings == 1

    run(what)


def test_a_publication_waits_for_a_listing_that_begins_behind_it_and_shares_it() -> None:
    async def what(registry: FakeRegistry, counts: StoredCounts) -> None:
        registry.may_end.clear()
        first = asyncio.create_task(counts.now(TENANT))
        await begun(registry, 1)
        # In no listing that has begun.
        registry.add("a", 1)
        others = [asyncio.create_task(counts.now(TENANT)) for _ in range(20)]
        await asyncio.sleep(0.01)
        registry.may_end.set()
        assert (await first).num_versions == 0
        assert {each.num_versions for each in await asyncio.gather(*others)} == {1}
        assert (registry.num_listings, registry.most_at_once) == (2, 1)

    run(what)


def test_a_count_that_is_old_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_module, "RECENT_S", 0.0)
    monkeypatch.setattr(stored_module, "RECENT_TIMES", 0)

    async def what(registry: FakeRegistry, counts: StoredCounts) -> None:
        assert (await counts.recent(TENANT)).num_versions == 0
        registry.add("a", 1)
        await asyncio.sleep(0.01)
        assert (await counts.recent(TENANT)).num_versions == 1

    run(what)


def test_what_this_process_publishes_counts_at_once_and_once() -> None:
    async def what(registry: FakeRegistry, counts: StoredCounts) -> None:
        known = registry.add("a", 1)
        before = await counts.recent(TENANT)
        assert (before.num_versions, before.num_variants, before.num_bytes) == (1, 1, 10)
        new = f"{1:064x}"
        with counts.publishing(TENANT, "b", new, 7), counts.publishing(TENANT, "a", known, 10):
            during = await counts.recent(TENANT)
            # Bytes of uploads under way are counted by their admission.
            assert (during.num_versions, during.num_variants, during.num_bytes) == (2, 2, 10)
            assert during.has("b", new)
            assert during.has_artifact(new)
            assert (during.num_versions_of("a"), during.num_versions_of("b")) == (1, 1)
            registry.add("b", 1, 7)
        for after in (await counts.recent(TENANT), await counts.now(TENANT), await counts.recent(TENANT)):
            assert (after.num_versions, after.num_variants, after.num_bytes) == (2, 2, 17)
        assert (await counts.recent("other")).num_versions == 2
        assert registry.num_listings == 3

    run(what)


def test_what_could_not_be_published_does_not_count() -> None:
    async def what(registry: FakeRegistry, counts: StoredCounts) -> None:
        await counts.recent(TENANT)
        with pytest.raises(ValueError, match="no"), counts.publishing(TENANT, "b", "0" * 64, 7):
            raise ValueError("no")
        assert (await counts.recent(TENANT)).num_versions == 0

    run(what)


def test_what_this_process_deleted_does_not_count_any_more() -> None:
    async def what(registry: FakeRegistry, counts: StoredCounts) -> None:
        digest = registry.add("a", 1)
        with counts.publishing(TENANT, "a", digest, 10):
            pass
        assert (await counts.recent(TENANT)).num_versions == 1
        registry.may_end.clear()
        old = asyncio.create_task(counts.now(TENANT))
        await begun(registry, 2)
        registry.files.clear()
        counts.deleted(TENANT)
        new = asyncio.create_task(counts.recent(TENANT))
        await asyncio.sleep(0.01)
        registry.may_end.set()
        assert (await old).num_versions == 1
        assert (await new).num_versions == 0
        assert (await counts.recent(TENANT)).num_versions == 0

    run(what)


def test_a_waiter_that_leaves_ends_no_listing_of_others() -> None:
    async def what(registry: FakeRegistry, counts: StoredCounts) -> None:
        registry.may_end.clear()
        one, other = (asyncio.create_task(counts.recent(TENANT)) for _ in range(2))
        await begun(registry, 1)
        one.cancel()
        registry.may_end.set()
        assert (await other).num_versions == 0

    run(what)


def test_counts_of_many_versions_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_module, "MAX_KEPT", 2)

    async def what(registry: FakeRegistry, counts: StoredCounts) -> None:
        for number in range(3):
            registry.add("a", number + 1)
        for _ in range(2):
            assert (await counts.recent(TENANT)).num_versions == 3
        assert registry.num_listings == 2

    run(what)


def test_a_hundred_thousand_names_are_counted_in_little_memory(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "registry")
    reports = registry.root / "reports" / TENANT
    reports.mkdir(parents=True)
    for number in range(100_000):
        name = ReportFile(f"variant-{number % 10_000}", 1 + number // 10_000, f"{number:064x}", 3, "0" * 32)
        (reports / name.file_name).touch()
    rests: list[None] = []
    tracemalloc.start()
    found = registry.stored(TENANT, lambda: rests.append(None))
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (found.num_versions, found.num_variants, found.num_bytes) == (100_000, 10_000, 300_000)
    assert (found.num_versions_of("variant-7"), found.has("variant-7", f"{7:064x}")) == (10, True)
    assert len(rests) == 100_000 // 4096
    # A list of the names alone would take 20 MB.
    assert kept < 4_000_000
    assert peak < 15_000_000
