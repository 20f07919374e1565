"""Failing loads fail alone and leave no slot or memory taken. A resident delta holds verified bytes only."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deltastore.errors import (
    ArtifactTooLarge,
    RegistryError,
    StorageFull,
    VariantNotFound,
    VariantQuarantined,
)
from deltastore.loader import Loader
from deltastore.registry import Registry
from server.deltas.resident import DeltaLayout, DeltaTables, ResidentDelta, Slot
from server.errors import EngineFailed
from tests.deltastore.helpers.crash_storage import FACTS
from tests.server.helpers.residency import ResidencyHarness, block_disk, running_residency


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[ResidencyHarness]:
    """Run a residency with two slots and host memory for many deltas."""
    with running_residency(tmp_path, num_slots=2) as running:
        yield running


def is_as_if_never_loaded(harness: ResidencyHarness, digest: str) -> bool:
    """True if a delta is neither in a slot nor in host memory, and no slot is lost."""
    return (
        harness.residency.find(digest) is None
        and harness.residency.level_of(digest) == "disk"
        and harness.metric("slots_in_use") == harness.metric("variants_resident", level="device")
    )


def test_a_corrupt_object_is_quarantined_not_cached_and_fails_alone(harness: ResidencyHarness) -> None:
    good, bad = harness.publish("good", seed=1), harness.publish("bad", seed=2)
    harness.corrupt(bad)
    fine, error = harness.load(good, bad)
    assert fine is None
    assert isinstance(error, VariantQuarantined)
    assert "its stored object is corrupt and was quarantined" in str(error)
    assert harness.registry.is_quarantined(bad)
    assert is_as_if_never_loaded(harness, bad.label)
    assert harness.in_slot(good) == harness.section(good)
    assert harness.metric("variant_load_failures_total", reason="corrupt") == 1
    assert harness.metric("variant_load_seconds_count", source="disk", stage="total") == 1


def test_an_object_corrupted_between_two_loads_is_served_from_host_memory_and_quarantined_after(
    harness: ResidencyHarness,
) -> None:
    record, *others = (harness.publish(f"v{seed}", seed) for seed in range(3))
    section = harness.section(record)
    harness.load(record)
    harness.corrupt(record)
    for other in others:
        harness.load(other)
    assert harness.residency.level_of(record.label) == "host"
    assert harness.load(record) == [None]
    assert harness.in_slot(record) == section
    assert harness.residency.evict(record.label, "unload")
    assert isinstance(harness.load(record)[0], VariantQuarantined)
    assert harness.registry.is_quarantined(record)
    assert is_as_if_never_loaded(harness, record.label)


def test_a_quarantined_object_that_was_uploaded_again_is_loaded(harness: ResidencyHarness) -> None:
    record = harness.publish("v", seed=1)
    section = harness.section(record)
    harness.corrupt(record)
    harness.load(record)
    assert harness.publish("v", seed=1).digest == record.digest
    assert harness.load(record) == [None]
    assert harness.in_slot(record) == section


def test_a_corrupt_object_that_is_uploaded_again_while_it_is_read_is_loaded_and_not_quarantined(
    harness: ResidencyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = harness.publish("v", seed=1)
    section = harness.section(record)
    harness.corrupt(record)
    disk = block_disk(monkeypatch)
    assert harness.residency.load(record.label, record.label)
    assert disk.reading.wait(240)
    with harness.registry.open_upload(None) as upload:
        upload.write((harness.directory / "v-1.safetensors").read_bytes())
        harness.registry.publish(upload.seal(), FACTS, tenant="default", name="v")
    disk.open.set()
    assert harness.settle()[record.label] is None
    assert harness.in_slot(record) == section
    assert not harness.registry.is_quarantined(record)


@pytest.mark.parametrize("size_bytes", [0, 100, 5000])
def test_a_truncated_object_is_quarantined(harness: ResidencyHarness, size_bytes: int) -> None:
    record = harness.publish("v", seed=1)
    harness.path(record).chmod(0o644)
    os.truncate(harness.path(record), size_bytes)
    assert isinstance(harness.load(record)[0], VariantQuarantined)
    assert is_as_if_never_loaded(harness, record.label)


def test_an_object_that_a_dead_collection_set_aside_is_put_back_and_loaded(harness: ResidencyHarness) -> None:
    record = harness.publish("a", seed=1)
    path = harness.path(record)
    path.rename(path.with_name(f"{record.digest}.{'0' * 16}"))
    assert harness.load(record) == [None]
    assert harness.in_slot(record) == harness.section(record)


def test_an_object_that_is_gone_is_missing_and_not_quarantined(harness: ResidencyHarness) -> None:
    record = harness.publish("v", seed=1)
    harness.path(record).unlink()
    assert isinstance(harness.load(record)[0], VariantNotFound)
    assert not harness.registry.is_quarantined(record)
    assert is_as_if_never_loaded(harness, record.label)
    assert harness.metric("variant_load_failures_total", reason="missing") == 1


def test_an_object_deleted_while_it_is_read_is_read_to_its_end_and_its_unloading_goes_on(
    harness: ResidencyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = harness.publish("v", seed=1)
    section = harness.section(record)
    disk = block_disk(monkeypatch)
    assert harness.residency.load(record.label, record.label)
    assert disk.reading.wait(240)
    harness.registry.delete("default", "v")
    harness.registry.gc()
    assert not harness.residency.evict(record.label, "unload")
    disk.open.set()
    assert harness.settle()[record.label] is None
    assert harness.in_slot(record) == section
    assert harness.residency.evict(record.label, "unload")
    assert is_as_if_never_loaded(harness, record.label)


def test_a_disk_that_fails_once_is_no_corruption(
    harness: ResidencyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = harness.publish("v", seed=1)

    def fail(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as failing:
        failing.setattr(os, "preadv", fail)
        (error,) = harness.load(record)
    assert isinstance(error, RegistryError)
    assert "Input/output error" in str(error)
    assert is_as_if_never_loaded(harness, record.label)
    assert harness.metric("variant_load_failures_total", reason="error") == 1
    assert harness.load(record) == [None]
    assert harness.in_slot(record) == harness.section(record)


def test_a_file_that_another_machine_replaced_while_it_was_read_is_read_again(
    harness: ResidencyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = harness.publish("v", seed=1)
    real, stale = os.preadv, [1, 1]

    def stale_first(fd: int, buffers: list[memoryview], offset: int) -> int:
        if stale:
            stale.pop()
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", stale_first)
    assert harness.load(record) == [None]
    assert harness.in_slot(record) == harness.section(record)


def test_a_corrupt_object_that_a_full_disk_keeps_from_quarantine_is_not_loaded_either(
    harness: ResidencyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = harness.publish("v", seed=1)
    harness.corrupt(record)

    def full(*_: object) -> bool:
        raise StorageFull("the disk is full")

    monkeypatch.setattr(Registry, "quarantine", full)
    for _ in range(2):
        assert isinstance(harness.load(record)[0], VariantQuarantined)
    assert is_as_if_never_loaded(harness, record.digest)


def test_out_of_device_memory_beside_the_slot_fails_that_load_alone(
    harness: ResidencyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = harness.publish("good", seed=1), harness.publish("bad", seed=2)
    adopt = DeltaTables.adopt

    def fail_for_bad(tables: DeltaTables, layout: DeltaLayout, slot: Slot, section: Tensor) -> ResidentDelta:
        if layout.digest == bad.digest:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return adopt(tables, layout, slot, section)

    with monkeypatch.context() as failing:
        failing.setattr(DeltaTables, "adopt", fail_for_bad)
        fine, error = harness.load(good, bad)
    assert fine is None
    assert isinstance(error, EngineFailed)
    assert "it could not be loaded: OutOfMemoryError: CUDA out of memory" in str(error)
    assert harness.metric("slots_in_use") == 1
    assert harness.residency.level_of(bad.label) == "host"
    assert harness.load(bad) == [None]
    assert harness.in_slot(bad) == harness.section(bad)


def test_out_of_host_memory_while_reading_leaves_nothing_behind(
    harness: ResidencyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = harness.publish("v", seed=1)

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as failing:
        failing.setattr(Loader, "_read_chunk", fail)
        (error,) = harness.load(record)
    assert isinstance(error, EngineFailed)
    assert is_as_if_never_loaded(harness, record.label)
    for _ in range(3):
        assert harness.load(record) == [None]
        assert harness.residency.evict(record.label, "unload")


def test_an_artifact_larger_than_a_slot_is_refused_before_it_is_read(
    harness: ResidencyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = harness.publish("large", seed=1, norm_length=40_000)
    disk = block_disk(monkeypatch)
    (error,) = harness.load(record)
    assert isinstance(error, ArtifactTooLarge)
    assert f"needs {record.device_bytes} bytes on the device and a slot has 65536" in str(error)
    assert not disk.reading.is_set()
    assert is_as_if_never_loaded(harness, record.label)


def test_failed_loads_cost_no_slot_and_no_host_memory(tmp_path: Path) -> None:
    # Host memory for two staged loads.
    with running_residency(tmp_path, num_slots=2, num_loads=1, host_cache_bytes=0) as harness:
        bad = [harness.publish(f"bad{seed}", seed) for seed in range(8)]
        good = [harness.publish(f"good{seed}", seed + 100) for seed in range(2)]
        for record in bad:
            harness.corrupt(record)
            assert isinstance(harness.load(record)[0], VariantQuarantined)
        assert harness.load(*good) == [None, None]
        assert [harness.in_slot(record) == harness.section(record) for record in good] == [True, True]
