"""Loads of objects that must be downloaded: they hold no other load, are measured apart, and fail alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltastore.errors import RegistryUnavailable
from deltastore.registry import Registry
from deltastore.registry.directory.files import DirectoryObjects
from deltastore.registry.directory.store import DirectoryStore
from deltastore.registry.records import VersionRecord
from deltastore.registry.storage import Reserve, Storage
from server.deltas.fetcher import NUM_DOWNLOADS
from tests.server.helpers.residency import WAIT_S, ResidencyHarness, running_residency


class SlowObjects(DirectoryObjects):
    """Objects of which those in `remote` are downloaded when `open` is set, or fail while `is_away`."""

    def __init__(self, root: Path) -> None:
        storage = Storage()
        super().__init__(root, storage, Reserve(root, storage))
        self.remote: set[str] = set()
        self.open = threading.Event()
        self.downloading = threading.Semaphore(0)
        self.is_away = False

    def is_local(self, record: VersionRecord) -> bool:
        return record.digest not in self.remote

    def local_path(self, record: VersionRecord) -> Path:
        if record.digest in self.remote:
            self.downloading.release()
            assert self.open.wait(WAIT_S)
            if self.is_away:
                raise RegistryUnavailable("the bucket is away")
            self.remote.discard(record.digest)
        return super().local_path(record)


@pytest.fixture
def objects(tmp_path: Path) -> SlowObjects:
    return SlowObjects(tmp_path / "registry")


@pytest.fixture
def harness(tmp_path: Path, objects: SlowObjects) -> Iterator[ResidencyHarness]:
    store = DirectoryStore(tmp_path / "registry", Storage())
    store.objects = objects
    with running_residency(
        tmp_path, num_slots=NUM_DOWNLOADS + 3, num_loads=1, registry=Registry(store)
    ) as running:
        yield running
        objects.open.set()


def test_downloads_hold_no_load_of_a_local_object_or_of_the_host_cache(
    harness: ResidencyHarness, objects: SlowObjects
) -> None:
    cached, local = harness.publish("cached", seed=1), harness.publish("local", seed=2)
    remote = [harness.publish(f"remote{seed}", seed) for seed in range(10, 11 + NUM_DOWNLOADS)]
    assert harness.load(cached) == [None]
    for seed in range(100, 100 + harness.residency.num_slots):
        assert harness.load(harness.publish(f"other{seed}", seed)) == [None]
    assert harness.residency.level_of(cached.label) == "host"
    objects.remote = {record.digest for record in remote}
    for record in remote:
        assert harness.residency.load(record.label, record.label)
    for _ in range(NUM_DOWNLOADS):
        assert objects.downloading.acquire(timeout=WAIT_S)
    assert harness.residency.load(local.label, local.label)
    assert harness.residency.load(cached.label, cached.label)
    while any(harness.residency.is_loading(record.label) for record in (local, cached)):
        assert harness.load_ended.wait(WAIT_S)
        harness.load_ended.clear()
        assert {load.error for load in harness.residency.poll_loads()} <= {None}
    assert not objects.downloading.acquire(blocking=False), "more downloads than the bound"
    objects.open.set()
    assert harness.metric("variant_load_seconds_count", source="host", stage="total") == 1
    assert set(harness.settle().values()) == {None}


def test_a_download_is_counted_under_its_own_source_with_its_stages(
    harness: ResidencyHarness, objects: SlowObjects
) -> None:
    record = harness.publish("remote", seed=1)
    objects.remote = {record.digest}
    objects.open.set()
    assert harness.load(record) == [None]
    assert harness.in_slot(record) == harness.section(record)
    for stage in ("fetch", "read", "copy", "total"):
        assert harness.metric("variant_load_seconds_count", source="store", stage=stage) == 1
    assert harness.metric("variant_load_bytes_total", source="store") == record.device_bytes
    assert harness.metric("variant_load_seconds_count", source="disk", stage="total") == 0


def test_a_failed_download_frees_its_slot_and_the_next_load_tries_again(
    harness: ResidencyHarness, objects: SlowObjects
) -> None:
    record = harness.publish("remote", seed=1)
    objects.remote, objects.is_away = {record.digest}, True
    objects.open.set()
    (error,) = harness.load(record)
    assert isinstance(error, RegistryUnavailable)
    assert harness.metric("slots_in_use") == 0
    objects.is_away = False
    assert harness.load(record) == [None]
    assert harness.metric("slots_in_use") == 1
