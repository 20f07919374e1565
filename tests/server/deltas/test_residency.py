"""Residency: the contents of slots and host memory after loads, uses and evictions; no call waits for a disk."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltastore.registry.records import VersionRecord
from server.errors import EngineFailed, InvalidRequest
from tests.server.helpers.live_server import eventually
from tests.server.helpers.residency import WAIT_S, ResidencyHarness, block_disk, running_residency
from tests.server.metrics.helpers.samples import samples_of


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[ResidencyHarness]:
    """Run a residency with three slots and host memory for many more deltas."""
    with running_residency(tmp_path) as running:
        yield running


def levels(harness: ResidencyHarness, *digests: str) -> list[str]:
    return [harness.residency.level_of(digest) for digest in digests]


def test_a_loaded_delta_is_visible_once_loads_are_polled_and_its_slot_equals_its_device_section(
    harness: ResidencyHarness,
) -> None:
    record = harness.publish("v", seed=1)
    assert harness.residency.load(record.label, record.label)
    assert harness.residency.is_loading(record.label)
    assert harness.load_ended.wait(WAIT_S)
    assert harness.residency.find(record.label) is None
    assert harness.settle() == {record.label: None}
    assert harness.residency.is_resident(record.label)
    assert not harness.residency.is_loading(record.label)
    assert harness.in_slot(record) == harness.section(record)


def test_a_delta_that_left_its_slot_comes_back_from_host_memory_without_a_file(
    harness: ResidencyHarness,
) -> None:
    records = [harness.publish(f"v{seed}", seed) for seed in range(4)]
    section = harness.section(records[0])
    for record in records:
        harness.load(record)
    assert levels(harness, *(record.label for record in records)) == ["host", "device", "device", "device"]
    harness.path(records[0]).unlink()
    assert harness.load(records[0]) == [None]
    assert harness.in_slot(records[0]) == section
    assert harness.metric("variant_load_seconds_count", source="disk", stage="read") == 4
    assert harness.metric("variant_load_seconds_count", source="host", stage="read") == 0
    assert harness.metric("variant_load_seconds_count", source="host", stage="copy") == 1
    assert harness.metric("variant_load_seconds_count", source="host", stage="total") == 1
    assert harness.metric("variant_load_bytes_total", source="host") == records[0].device_bytes


def test_without_a_host_cache_every_load_is_from_disk(tmp_path: Path) -> None:
    with running_residency(tmp_path, num_slots=2, host_cache_bytes=0) as harness:
        records = [harness.publish(f"v{seed}", seed) for seed in range(3)]
        for record in (*records, records[0]):
            assert harness.load(record) == [None]
            assert harness.in_slot(record) == harness.section(record)
        assert levels(harness, *(record.label for record in records)) == ["device", "disk", "device"]
        assert harness.metric("variant_load_seconds_count", source="disk", stage="total") == 4
        assert harness.metric("host_cache_bytes") == harness.metric("variants_resident", level="host") == 0


def test_the_least_recently_used_idle_delta_is_evicted(harness: ResidencyHarness) -> None:
    records = [harness.publish(f"v{seed}", seed) for seed in range(4)]
    harness.load(*records[:3])
    harness.residency.find(records[0].label)
    harness.residency.acquire(records[1].label)
    harness.load(records[3])
    assert [harness.residency.is_resident(record.label) for record in records] == [True, True, False, True]
    assert harness.metric("variant_evictions_total", level="device", reason="capacity") == 1


def test_releasing_is_a_use(harness: ResidencyHarness) -> None:
    records = [harness.publish(f"v{seed}", seed) for seed in range(4)]
    harness.load(*records[:3])
    harness.residency.acquire(records[0].label)
    for record in records[1:3]:
        harness.residency.find(record.label)
    harness.residency.release(records[0].label)
    harness.load(records[3])
    assert not harness.residency.is_resident(records[1].label)


def test_a_delta_in_use_pinned_or_loading_is_never_evicted(
    harness: ResidencyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_use, pinned, loading, other = (harness.publish(f"v{seed}", seed) for seed in range(4))
    harness.load(in_use, pinned)
    for _ in range(2):
        harness.residency.acquire(in_use.label)
    harness.residency.release(in_use.label)
    harness.residency.pin(pinned)
    disk = block_disk(monkeypatch)
    assert harness.residency.load(loading.label, loading.label)
    assert not harness.residency.load(other.label, other.label)
    disk.open.set()
    harness.settle()
    harness.residency.acquire(loading.label)
    assert not harness.residency.load(other.label, other.label)
    harness.residency.unpin(pinned.label)
    assert harness.load(other) == [None]
    assert levels(harness, in_use.label, pinned.label, loading.label) == ["device", "host", "device"]


def test_a_view_of_a_slot_that_was_given_away_is_refused(harness: ResidencyHarness) -> None:
    records = [harness.publish(f"v{seed}", seed) for seed in range(4)]
    harness.load(records[0])
    delta = harness.residency.find(records[0].label)
    assert delta is not None
    delta.check_alive()
    harness.load(*records[1:])
    with pytest.raises(EngineFailed, match="no longer holds delta"):
        delta.check_alive()


def test_one_slot_is_never_pinned(harness: ResidencyHarness) -> None:
    records = [harness.publish(f"v{seed}", seed) for seed in range(3)]
    harness.load(*records)
    for record in (*records[:2], records[0]):
        harness.residency.pin(record)
    with pytest.raises(InvalidRequest, match="all slots that may be pinned are pinned already"):
        harness.residency.pin(records[2])
    assert [harness.residency.is_pinned(record.label) for record in records] == [True, True, False]
    assert harness.metric("slots_pinned") == 2


def test_eviction_on_demand_frees_slot_and_host_memory(harness: ResidencyHarness) -> None:
    record = harness.publish("v", seed=1)
    harness.load(record)
    harness.residency.acquire(record.label)
    assert not harness.residency.evict(record.label, "unload")
    harness.residency.release(record.label)
    assert harness.residency.evict(record.label, "unload")
    assert harness.residency.level_of(record.label) == "disk"
    assert harness.metric("variant_evictions_total", level="device", reason="unload") == 1
    assert harness.metric("variant_evictions_total", level="host", reason="unload") == 1
    assert harness.metric("host_cache_bytes") == 0


def test_a_delta_without_a_slot_leaves_host_memory_on_demand(harness: ResidencyHarness) -> None:
    records = [harness.publish(f"v{seed}", seed) for seed in range(4)]
    for record in records:
        harness.load(record)
    assert harness.residency.level_of(records[0].label) == "host"
    assert harness.residency.evict(records[0].label, "unload")
    assert harness.residency.level_of(records[0].label) == "disk"
    assert harness.residency.evict(records[0].label, "unload")


def test_a_delta_that_leaves_its_slot_was_used_more_recently_than_those_without_a_slot(
    tmp_path: Path,
) -> None:
    with running_residency(tmp_path, num_slots=2, host_cache_bytes=3 * 24576) as harness:
        a, b, c, d = (harness.publish(f"v{seed}", seed) for seed in range(4))
        harness.load(a)
        harness.residency.acquire(a.label)
        for record in (b, c):
            harness.load(record)
        harness.residency.release(a.label)
        harness.residency.find(c.label)
        # Takes the slot of `a`; host memory has three deltas then.
        harness.load(d)
        assert levels(harness, a.label, b.label, c.label, d.label) == ["host", "disk", "device", "device"]


def test_a_version_is_retained_until_it_was_forgotten_as_often(harness: ResidencyHarness) -> None:
    record = harness.publish("v", seed=1)
    harness.residency.retain(record)
    harness.residency.forget(record.label)
    assert harness.load(record) == [None]
    assert harness.residency.evict(record.label, "unload")
    harness.residency.forget(record.label)
    with pytest.raises(KeyError):
        harness.residency.load(record.label, record.label)


def test_a_version_is_unloaded_once_nothing_waits_for_it_or_uses_it(harness: ResidencyHarness) -> None:
    record = harness.publish("v", seed=1)
    harness.load(record)
    assert not harness.residency.unload(record.label)
    harness.residency.forget(record.label)
    harness.residency.acquire(record.label)
    assert not harness.residency.unload(record.label)
    harness.residency.release(record.label)
    assert harness.residency.unload(record.label)
    assert harness.residency.level_of(record.label) == "disk"
    # What is in no memory is unloaded.
    assert harness.residency.unload(record.label)


def test_many_loads_of_one_version_are_one_read(harness: ResidencyHarness) -> None:
    record = harness.publish("v", seed=1)
    for _ in range(5):
        assert harness.residency.load(record.label, record.label)
    harness.settle()
    assert harness.residency.load(record.label, record.label)
    assert harness.metric("variant_load_bytes_total", source="disk") == record.device_bytes
    assert harness.metric("slots_in_use") == 1


@pytest.mark.parametrize("host_cache_bytes", [0, 30_000, 1 << 20])
def test_more_loads_than_fit_host_memory_at_once_all_end_well(tmp_path: Path, host_cache_bytes: int) -> None:
    with running_residency(tmp_path, num_slots=8, host_cache_bytes=host_cache_bytes) as harness:
        records = [harness.publish(f"v{seed}", seed, norm_length=4000 * (1 + seed)) for seed in range(8)]
        assert harness.load(*records) == [None] * 8
        assert all(harness.in_slot(record) == harness.section(record) for record in records)


def test_nothing_that_the_engine_calls_waits_for_a_disk(
    harness: ResidencyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [harness.publish(f"v{seed}", seed) for seed in range(3)]
    harness.load(records[0])
    disk = block_disk(monkeypatch)
    for record in records[1:]:
        assert harness.residency.load(record.label, record.label)
    assert disk.reading.wait(240)
    assert list(harness.residency.poll_loads()) == []
    assert harness.residency.find(records[0].label) is not None
    assert levels(harness, *(record.label for record in records)) == ["device", "disk", "disk"]
    assert not harness.residency.evict(records[1].label, "unload")
    assert harness.residency.evict(records[0].label, "unload")
    disk.open.set()
    assert harness.settle() == {record.label: None for record in records[1:]}


def test_a_load_from_host_memory_does_not_wait_behind_loads_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_residency(tmp_path, num_slots=3, num_loads=1) as harness:
        cached, *cold = (harness.publish(f"v{seed}", seed) for seed in range(5))
        for record in (cached, *cold[:3]):
            harness.load(record)
        assert harness.residency.level_of(cached.label) == "host"
        for record in cold[:3]:
            harness.residency.evict(record.label, "unload")
        disk = block_disk(monkeypatch)
        for record in cold[:2]:
            assert harness.residency.load(record.label, record.label)
        assert harness.residency.load(cached.label, cached.label)
        assert harness.load_ended.wait(WAIT_S)
        assert [load.version for load in harness.residency.poll_loads()] == [cached.label]
        disk.open.set()
        assert harness.settle() == {record.label: None for record in cold[:2]}


def test_metrics_show_which_deltas_are_at_which_level(harness: ResidencyHarness) -> None:
    first, second = (harness.publish("twice", seed) for seed in (1, 2))
    others = [harness.publish(f"v{seed}", seed) for seed in (3, 4)]
    harness.load(first, second, others[0])
    assert harness.metric("variants_resident", level="device") == harness.metric("slots_in_use") == 3
    assert harness.metric("variants_resident", level="host") == 3
    for level in ("device", "host"):
        assert harness.metric("variant_resident", variant="default/twice", level=level) == 1
    harness.load(others[1])
    # One of its two versions was evicted.
    assert harness.metric("variant_resident", variant="default/twice", level="device") == 1
    harness.residency.evict(first.label, "unload")
    harness.residency.evict(second.label, "unload")
    assert harness.metric("variant_resident", variant="default/twice", level="device") is None
    assert harness.metric("variant_resident", variant="default/twice", level="host") is None
    assert harness.metric("variant_resident", variant="default/v4", level="host") == 1
    assert harness.metric("variants_resident", level="host") == 2
    assert harness.metric("host_cache_bytes") == 2 * 24576


def loaded_adapters(harness: ResidencyHarness) -> set[tuple[str, str, str]]:
    """Return the name, level and pin of each adapter under vLLM's metric."""
    return {
        (sample.labels["adapter_name"], sample.labels["level"], sample.labels["pinned"])
        for sample in samples_of(harness.metrics)
        if sample.name == "vllm:lora_adapter_loaded"
    }


def test_routers_see_each_adapter_in_memory_once_at_its_best_level(harness: ResidencyHarness) -> None:
    records = [harness.publish(f"v{seed}", seed) for seed in range(4)]
    for record in records:
        harness.load(record)
    harness.residency.pin(records[1])
    on_gpu = {("v2", "gpu", "false"), ("v3", "gpu", "false")}
    assert loaded_adapters(harness) == {("v0", "cpu", "false"), ("v1", "gpu", "true"), *on_gpu}
    harness.residency.unpin(records[1].label)
    for record in records[:2]:
        harness.residency.evict(record.label, "unload")
    assert loaded_adapters(harness) == on_gpu


def same_bytes(harness: ResidencyHarness, record: VersionRecord, **changes: Any) -> VersionRecord:
    """Return another version with the bytes of one, retained."""
    other = dataclasses.replace(record, **changes)
    harness.residency.retain(other)
    harness.published.add(other.label)
    return other


def test_versions_of_two_tenants_with_the_same_bytes_share_nothing(harness: ResidencyHarness) -> None:
    first = harness.publish("first", seed=1)
    second = same_bytes(harness, first, tenant="acme", name="second")
    harness.load(first)
    # To the other tenant nothing is loaded, and its load reads the object again.
    assert levels(harness, first.label, second.label) == ["device", "disk"]
    assert harness.metric("variant_resident", variant="acme/second", level="device") is None
    harness.load(second)
    assert harness.metric("variant_load_bytes_total", source="disk") == 2 * first.device_bytes
    assert harness.metric("slots_in_use") == 2
    harness.residency.pin(second)
    assert [harness.residency.is_pinned(record.label) for record in (first, second)] == [False, True]
    assert loaded_adapters(harness) == {("first", "gpu", "false"), ("second", "gpu", "true")}
    harness.residency.forget(first.label)
    assert harness.residency.unload(first.label)
    assert levels(harness, first.label, second.label) == ["disk", "device"]
    assert loaded_adapters(harness) == {("second", "gpu", "true")}


def test_versions_of_one_variant_are_one_series_while_one_is_in_memory(harness: ResidencyHarness) -> None:
    first = harness.publish("v", seed=1)
    second = same_bytes(harness, first, version=2)
    harness.load(first, second)
    harness.residency.forget(first.label)
    assert harness.residency.unload(first.label)
    assert harness.metric("variant_resident", variant="default/v", level="device") == 1
    assert loaded_adapters(harness) == {("v", "gpu", "false")}
    harness.residency.forget(second.label)
    assert harness.residency.unload(second.label)
    assert harness.metric("variant_resident", variant="default/v", level="device") is None
    assert loaded_adapters(harness) == set()


def test_closing_lets_the_running_load_end_and_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_residency(tmp_path, num_loads=1) as harness:
        records = [harness.publish(f"v{seed}", seed) for seed in range(3)]
        disk = block_disk(monkeypatch)
        for record in records:
            assert harness.residency.load(record.label, record.label)
        fetches = [harness.residency._entries[record.label].fetch for record in records]
        assert disk.reading.wait(240)
        closing = threading.Thread(target=harness.residency.close)
        closing.start()
        # Those that wait are cancelled while the first still reads.
        assert eventually(lambda: all(fetch.cancelled() for fetch in fetches[1:]))
        disk.open.set()
        closing.join(240)
        assert not closing.is_alive()
        assert fetches[0].exception() is None
        assert all(fetch.cancelled() for fetch in fetches[1:])
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("delta-")]
