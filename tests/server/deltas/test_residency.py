"""Residency: what is in slots and in host memory after loads, uses and evictions, and that nobody waits for a disk."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.errors import EngineFailed, InvalidRequest
from tests.server.helpers.residing import Residing, hold_disk, residing


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Residing]:
    """Three slots, and host memory for many more."""
    with residing(tmp_path) as running:
        yield running


def levels(place: Residing, *digests: str) -> list[str]:
    return [place.residency.level_of(digest) for digest in digests]


def test_a_loaded_delta_is_visible_from_adoption_on_and_its_slot_equals_its_device_section(
    place: Residing,
) -> None:
    record = place.publish("v", seed=1)
    assert place.residency.load(record.digest)
    assert place.residency.is_loading(record.digest)
    place.residency._entries[record.digest].fetch.result()
    assert place.residency.find(record.digest) is None
    assert place.settle() == {record.digest: None}
    assert place.residency.is_resident(record.digest)
    assert not place.residency.is_loading(record.digest)
    assert place.in_slot(record) == place.section(record)


def test_a_delta_that_left_its_slot_comes_back_from_host_memory_without_a_file(place: Residing) -> None:
    records = [place.publish(f"v{seed}", seed) for seed in range(4)]
    section = place.section(records[0])
    for record in records:
        place.load(record)
    assert levels(place, *(record.digest for record in records)) == ["host", "device", "device", "device"]
    place.path(records[0]).unlink()
    assert place.load(records[0]) == [None]
    assert place.in_slot(records[0]) == section
    assert place.metric("variant_load_seconds_count", source="disk", stage="read") == 4
    assert place.metric("variant_load_seconds_count", source="host", stage="read") == 0
    assert place.metric("variant_load_seconds_count", source="host", stage="copy") == 1
    assert place.metric("variant_load_seconds_count", source="host", stage="total") == 1
    assert place.metric("variant_load_bytes_total", source="host") == records[0].device_bytes


def test_without_a_host_cache_every_load_is_from_disk(tmp_path: Path) -> None:
    with residing(tmp_path, num_slots=2, host_cache_bytes=0) as place:
        records = [place.publish(f"v{seed}", seed) for seed in range(3)]
        for record in (*records, records[0]):
            assert place.load(record) == [None]
            assert place.in_slot(record) == place.section(record)
        assert levels(place, *(record.digest for record in records)) == ["device", "disk", "device"]
        assert place.metric("variant_load_seconds_count", source="disk", stage="total") == 4
        assert place.metric("host_cache_bytes") == place.metric("variants_resident", level="host") == 0


def test_the_least_recently_used_idle_delta_makes_place(place: Residing) -> None:
    records = [place.publish(f"v{seed}", seed) for seed in range(4)]
    place.load(*records[:3])
    place.residency.find(records[0].digest)
    place.residency.acquire(records[1].digest)
    place.load(records[3])
    assert [place.residency.is_resident(record.digest) for record in records] == [True, True, False, True]
    assert place.metric("variant_evictions_total", level="device", reason="capacity") == 1


def test_letting_go_is_a_use(place: Residing) -> None:
    records = [place.publish(f"v{seed}", seed) for seed in range(4)]
    place.load(*records[:3])
    place.residency.acquire(records[0].digest)
    for record in records[1:3]:
        place.residency.find(record.digest)
    place.residency.release(records[0].digest)
    place.load(records[3])
    assert not place.residency.is_resident(records[1].digest)


def test_what_is_held_pinned_or_loading_never_makes_place(
    place: Residing, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, pinned, loading, other = (place.publish(f"v{seed}", seed) for seed in range(4))
    place.load(held, pinned)
    for _ in range(2):
        place.residency.acquire(held.digest)
    place.residency.release(held.digest)
    place.residency.pin(pinned.digest)
    disk = hold_disk(monkeypatch)
    assert place.residency.load(loading.digest)
    assert not place.residency.load(other.digest)
    disk.open.set()
    place.settle()
    place.residency.acquire(loading.digest)
    assert not place.residency.load(other.digest)
    place.residency.unpin(pinned.digest)
    assert place.load(other) == [None]
    assert levels(place, held.digest, pinned.digest, loading.digest) == ["device", "host", "device"]


def test_a_view_of_a_slot_that_was_given_away_is_refused(place: Residing) -> None:
    records = [place.publish(f"v{seed}", seed) for seed in range(4)]
    place.load(records[0])
    delta = place.residency.find(records[0].digest)
    assert delta is not None
    delta.check_alive()
    place.load(*records[1:])
    with pytest.raises(EngineFailed, match="no longer holds delta"):
        delta.check_alive()


def test_one_slot_is_never_pinned(place: Residing) -> None:
    records = [place.publish(f"v{seed}", seed) for seed in range(3)]
    place.load(*records)
    for record in (*records[:2], records[0]):
        place.residency.pin(record.digest)
    with pytest.raises(InvalidRequest, match="2 of 3 slots are pinned"):
        place.residency.pin(records[2].digest)
    assert [place.residency.is_pinned(record.digest) for record in records] == [True, True, False]
    assert place.metric("slots_pinned") == 2


def test_eviction_on_demand_frees_slot_and_host_memory(place: Residing) -> None:
    record = place.publish("v", seed=1)
    place.load(record)
    place.residency.acquire(record.digest)
    assert not place.residency.evict(record.digest, "unload")
    place.residency.release(record.digest)
    assert place.residency.evict(record.digest, "unload")
    assert place.residency.level_of(record.digest) == "disk"
    assert place.metric("variant_evictions_total", level="device", reason="unload") == 1
    assert place.metric("variant_evictions_total", level="host", reason="unload") == 1
    assert place.metric("host_cache_bytes") == 0


def test_a_delta_without_a_slot_leaves_host_memory_on_demand(place: Residing) -> None:
    records = [place.publish(f"v{seed}", seed) for seed in range(4)]
    for record in records:
        place.load(record)
    assert place.residency.level_of(records[0].digest) == "host"
    assert place.residency.evict(records[0].digest, "unload")
    assert place.residency.level_of(records[0].digest) == "disk"
    assert place.residency.evict(records[0].digest, "unload")


def test_a_delta_is_more_recently_used_when_it_leaves_its_slot_than_what_had_none(tmp_path: Path) -> None:
    with residing(tmp_path, num_slots=2, host_cache_bytes=3 * 24576) as place:
        a, b, c, d = (place.publish(f"v{seed}", seed) for seed in range(4))
        place.load(a)
        place.residency.acquire(a.digest)
        for record in (b, c):
            place.load(record)
        place.residency.release(a.digest)
        place.residency.find(c.digest)
        place.load(d)  # takes a's slot, and host memory for three
        assert levels(place, a.digest, b.digest, c.digest, d.digest) == ["host", "disk", "device", "device"]


def test_a_version_is_known_until_it_was_forgotten_as_often(place: Residing) -> None:
    record = place.publish("v", seed=1)
    place.residency.retain(record)
    place.residency.forget(record.digest)
    assert place.load(record) == [None]
    assert place.residency.evict(record.digest, "unload")
    place.residency.forget(record.digest)
    with pytest.raises(KeyError):
        place.residency.load(record.digest)


def test_many_loads_of_one_digest_are_one_read(place: Residing) -> None:
    record = place.publish("v", seed=1)
    for _ in range(5):
        assert place.residency.load(record.digest)
    place.settle()
    assert place.residency.load(record.digest)
    assert place.metric("variant_load_bytes_total", source="disk") == record.device_bytes
    assert place.metric("slots_in_use") == 1


@pytest.mark.parametrize("host_cache_bytes", [0, 30_000, 1 << 20])
def test_more_loads_than_fit_host_memory_at_once_all_end_well(tmp_path: Path, host_cache_bytes: int) -> None:
    with residing(tmp_path, num_slots=8, host_cache_bytes=host_cache_bytes) as place:
        records = [place.publish(f"v{seed}", seed, norm_length=4000 * (1 + seed)) for seed in range(8)]
        assert place.load(*records) == [None] * 8
        assert all(place.in_slot(record) == place.section(record) for record in records)


def test_nothing_that_the_engine_calls_waits_for_a_disk(
    place: Residing, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [place.publish(f"v{seed}", seed) for seed in range(3)]
    place.load(records[0])
    disk = hold_disk(monkeypatch)
    for record in records[1:]:
        assert place.residency.load(record.digest)
    assert disk.reading.wait(20)
    assert list(place.residency.poll_loads()) == []
    assert place.residency.find(records[0].digest) is not None
    assert levels(place, *(record.digest for record in records)) == ["device", "disk", "disk"]
    assert not place.residency.evict(records[1].digest, "unload")
    assert place.residency.evict(records[0].digest, "unload")
    disk.open.set()
    assert place.settle() == {record.digest: None for record in records[1:]}


def test_a_load_from_host_memory_does_not_wait_behind_loads_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with residing(tmp_path, num_slots=3, num_loads=1) as place:
        cached, *cold = (place.publish(f"v{seed}", seed) for seed in range(5))
        for record in (cached, *cold[:3]):
            place.load(record)
        assert place.residency.level_of(cached.digest) == "host"
        for record in cold[:3]:
            place.residency.evict(record.digest, "unload")
        disk = hold_disk(monkeypatch)
        for record in cold[:2]:
            assert place.residency.load(record.digest)
        assert place.residency.load(cached.digest)
        place.residency._entries[cached.digest].fetch.result(timeout=20)
        assert [adopted.record.digest for adopted in place.residency.poll_loads()] == [cached.digest]
        disk.open.set()
        assert place.settle() == {record.digest: None for record in cold[:2]}


def test_metrics_show_who_is_where(place: Residing) -> None:
    first, second = (place.publish("twice", seed) for seed in (1, 2))
    others = [place.publish(f"v{seed}", seed) for seed in (3, 4)]
    place.load(first, second, others[0])
    assert place.metric("variants_resident", level="device") == place.metric("slots_in_use") == 3
    assert place.metric("variants_resident", level="host") == 3
    for level in ("device", "host"):
        assert place.metric("variant_resident", variant="default/twice", level=level) == 1
    place.load(others[1])
    assert (
        place.metric("variant_resident", variant="default/twice", level="device") == 1
    )  # one of its two versions
    place.residency.evict(first.digest, "unload")
    place.residency.evict(second.digest, "unload")
    assert place.metric("variant_resident", variant="default/twice", level="device") is None
    assert place.metric("variant_resident", variant="default/twice", level="host") is None
    assert place.metric("variant_resident", variant="default/v4", level="host") == 1
    assert place.metric("variants_resident", level="host") == 2
    assert place.metric("host_cache_bytes") == 2 * 24576


def test_closing_lets_the_running_load_end_and_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with residing(tmp_path, num_loads=1) as place:
        records = [place.publish(f"v{seed}", seed) for seed in range(3)]
        disk = hold_disk(monkeypatch)
        for record in records:
            assert place.residency.load(record.digest)
        fetches = [place.residency._entries[record.digest].fetch for record in records]
        assert disk.reading.wait(20)
        closing = threading.Thread(target=place.residency.close)
        closing.start()
        disk.open.set()
        closing.join(20)
        assert not closing.is_alive()
        assert fetches[0].exception() is None
        assert all(fetch.cancelled() for fetch in fetches[1:])
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("delta-")]
