"""Loads that fail: whom they fail, what they leave behind, and that a slot never shows a byte that was not verified."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deltastore.errors import ArtifactTooLarge, RegistryError, VariantNotFound, VariantQuarantined
from deltastore.loader import Loader
from server.deltas.resident import ResidentDelta
from server.errors import EngineFailed
from tests.server.helpers.residing import Residing, hold_disk, residing


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Residing]:
    """Two slots, and host memory for many deltas."""
    with residing(tmp_path, num_slots=2) as running:
        yield running


def is_as_if_never_loaded(place: Residing, digest: str) -> bool:
    """Neither in a slot nor in host memory, and no slot is lost."""
    return (
        place.residency.find(digest) is None
        and place.residency.level_of(digest) == "disk"
        and place.metric("slots_in_use") == place.metric("variants_resident", level="device")
    )


def test_a_corrupt_object_is_quarantined_not_cached_and_fails_alone(place: Residing) -> None:
    good, bad = place.publish("good", seed=1), place.publish("bad", seed=2)
    place.corrupt(bad)
    fine, error = place.load(good, bad)
    assert fine is None
    assert isinstance(error, VariantQuarantined)
    assert "default/bad@1" in str(error)
    assert place.registry.is_quarantined(bad.digest)
    assert is_as_if_never_loaded(place, bad.digest)
    assert place.in_slot(good) == place.section(good)
    assert place.metric("variant_load_failures_total", reason="corrupt") == 1
    assert place.metric("variant_load_seconds_count", source="disk", stage="total") == 1


def test_an_object_corrupted_between_two_loads_is_served_from_host_memory_and_quarantined_after(
    place: Residing,
) -> None:
    record, *others = (place.publish(f"v{seed}", seed) for seed in range(3))
    section = place.section(record)
    place.load(record)
    place.corrupt(record)
    for other in others:
        place.load(other)
    assert place.residency.level_of(record.digest) == "host"
    assert place.load(record) == [None]
    assert place.in_slot(record) == section
    assert place.residency.evict(record.digest, "unload")
    assert isinstance(place.load(record)[0], VariantQuarantined)
    assert place.registry.is_quarantined(record.digest)
    assert is_as_if_never_loaded(place, record.digest)


def test_a_quarantined_object_that_was_uploaded_again_is_loaded(place: Residing) -> None:
    record = place.publish("v", seed=1)
    section = place.section(record)
    place.corrupt(record)
    place.load(record)
    assert place.publish("v", seed=1).digest == record.digest
    assert place.load(record) == [None]
    assert place.in_slot(record) == section


@pytest.mark.parametrize("size_bytes", [0, 100, 5000])
def test_a_truncated_object_is_quarantined(place: Residing, size_bytes: int) -> None:
    record = place.publish("v", seed=1)
    place.path(record).chmod(0o644)
    os.truncate(place.path(record), size_bytes)
    assert isinstance(place.load(record)[0], VariantQuarantined)
    assert is_as_if_never_loaded(place, record.digest)


def test_an_object_that_is_gone_is_missing_and_not_quarantined(place: Residing) -> None:
    record = place.publish("v", seed=1)
    place.path(record).unlink()
    assert isinstance(place.load(record)[0], VariantNotFound)
    assert not place.registry.is_quarantined(record.digest)
    assert is_as_if_never_loaded(place, record.digest)
    assert place.metric("variant_load_failures_total", reason="missing") == 1


def test_an_object_deleted_while_it_is_read_is_read_to_its_end_and_its_unloading_goes_on(
    place: Residing, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = place.publish("v", seed=1)
    section = place.section(record)
    disk = hold_disk(monkeypatch)
    assert place.residency.load(record.digest)
    assert disk.reading.wait(20)
    place.registry.delete("default", "v")
    place.registry.gc()
    assert not place.residency.evict(record.digest, "unload")
    disk.open.set()
    assert place.settle()[record.digest] is None
    assert place.in_slot(record) == section
    assert place.residency.evict(record.digest, "unload")
    assert is_as_if_never_loaded(place, record.digest)


def test_a_disk_that_fails_once_is_no_corruption(place: Residing, monkeypatch: pytest.MonkeyPatch) -> None:
    record = place.publish("v", seed=1)

    def fail(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as failing:
        failing.setattr(os, "preadv", fail)
        (error,) = place.load(record)
    assert isinstance(error, RegistryError)
    assert "Input/output error" in str(error)
    assert is_as_if_never_loaded(place, record.digest)
    assert place.metric("variant_load_failures_total", reason="error") == 1
    assert place.load(record) == [None]
    assert place.in_slot(record) == place.section(record)


def test_out_of_device_memory_beside_the_slot_fails_that_load_alone(
    place: Residing, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = place.publish("good", seed=1), place.publish("bad", seed=2)
    in_slot = ResidentDelta.in_slot

    def fail_for_bad(plan: object, slot: object) -> ResidentDelta:
        if plan.digest == bad.digest:  # type: ignore[attr-defined]
            raise torch.OutOfMemoryError("CUDA out of memory")
        return in_slot(plan, slot)  # type: ignore[arg-type]

    with monkeypatch.context() as failing:
        failing.setattr(ResidentDelta, "in_slot", fail_for_bad)
        fine, error = place.load(good, bad)
    assert fine is None
    assert isinstance(error, EngineFailed)
    assert "default/bad@1 could not be loaded: OutOfMemoryError: CUDA out of memory" in str(error)
    assert place.metric("slots_in_use") == 1
    assert place.residency.level_of(bad.digest) == "host"
    assert place.load(bad) == [None]
    assert place.in_slot(bad) == place.section(bad)


def test_out_of_host_memory_while_reading_leaves_nothing_behind(
    place: Residing, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = place.publish("v", seed=1)

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as failing:
        failing.setattr(Loader, "_read_chunk", fail)
        (error,) = place.load(record)
    assert isinstance(error, EngineFailed)
    assert is_as_if_never_loaded(place, record.digest)
    for _ in range(3):
        assert place.load(record) == [None]
        assert place.residency.evict(record.digest, "unload")


def test_an_artifact_larger_than_a_slot_is_refused_before_it_is_read(
    place: Residing, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = place.publish("large", seed=1, norm_length=40_000)
    disk = hold_disk(monkeypatch)
    (error,) = place.load(record)
    assert isinstance(error, ArtifactTooLarge)
    assert f"needs {record.device_bytes} bytes on the device and a slot has 65536" in str(error)
    assert not disk.reading.is_set()
    assert is_as_if_never_loaded(place, record.digest)


def test_failed_loads_cost_no_slot_and_no_host_memory(tmp_path: Path) -> None:
    with residing(tmp_path, num_slots=2, num_loads=1, host_cache_bytes=0) as place:  # room for two
        bad = [place.publish(f"bad{seed}", seed) for seed in range(8)]
        good = [place.publish(f"good{seed}", seed + 100) for seed in range(2)]
        for record in bad:
            place.corrupt(record)
            assert isinstance(place.load(record)[0], VariantQuarantined)
        assert place.load(*good) == [None, None]
        assert [place.in_slot(record) == place.section(record) for record in good] == [True, True]
