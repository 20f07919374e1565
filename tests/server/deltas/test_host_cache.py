"""The host cache: which copies it keeps and evicts. A copy in use never changes."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deltastore.errors import SettingsError
from deltastore.registry.records import VersionRecord
from server.deltas.fetcher import PAGE_BYTES, FreeList, HostCache
from server.deltas.resident import DeltaLayout
from server.kernels.reference import FIELDS
from server.metrics.metrics import EngineMetrics, ResidencyMetrics
from tests.server.metrics.helpers.samples import value_of

CPU = torch.device("cpu")
WAIT_S = 240.0


@dataclass(frozen=True, slots=True)
class CacheHarness:
    """A host cache for deltas that are numbers. All bytes of a delta are its number."""

    cache: HostCache
    metrics: EngineMetrics

    def read(self, number: int, num_pages: int = 1, keep: bool = True, tenant: str = "default") -> None:
        """Read a delta into the cache as a load does."""
        with self.cache.buffer(num_pages * PAGE_BYTES) as buffer:
            assert buffer is not None
            buffer.memory.fill_(number)
            if keep:
                self.cache.keep(buffer, *delta(number, tenant))

    def memory(self, number: int) -> Tensor | None:
        with self.cache.copy_of(label(number)) as copy:
            return None if copy is None else copy.memory

    def kept(self, *numbers: int) -> list[int]:
        """Return those of the numbers that the cache holds."""
        return [number for number in numbers if self.cache.holds(label(number))]

    def metric(self, name: str, **labels: str) -> float | None:
        return value_of(self.metrics, f"peraxis_{name}", labels)


def fixture(
    limit_pages: int, slot_pages: int = 8, num_loads: int = 1, is_staged: bool = True
) -> CacheHarness:
    metrics = EngineMetrics()
    sizes = (limit_pages * PAGE_BYTES, slot_pages * PAGE_BYTES, num_loads)
    cache = HostCache(*sizes, CPU, ResidencyMetrics(metrics), is_staged=is_staged)
    return CacheHarness(cache, metrics)


def digest(number: int) -> str:
    return f"{number:064x}"


def label(number: int) -> str:
    return delta(number)[0].label


def delta(number: int, tenant: str = "default") -> tuple[VersionRecord, DeltaLayout]:
    record = VersionRecord(
        tenant=tenant, name=f"v{number}", version=1, digest=digest(number), size_bytes=1, data_start=0,
        device_bytes=1, base_fingerprint="0" * 64, chunk_sha256=(), created_at="", method="both",
        report="0" * 32, activate=True,
    )  # fmt: skip
    return record, DeltaLayout(digest(number), np.zeros((0, FIELDS), dtype=np.int64), {}, 0)


def test_a_copy_is_found_with_its_plan_and_its_bytes() -> None:
    cached = fixture(limit_pages=8)
    cached.read(7, num_pages=3)
    with cached.cache.copy_of(label(7)) as copy:
        assert copy is not None
        assert copy.layout.digest == copy.record.digest == digest(7)
        assert torch.equal(copy.memory, torch.full((3 * PAGE_BYTES,), 7, dtype=torch.uint8))
    assert cached.memory(8) is None


def test_what_is_not_kept_is_free_again() -> None:
    cached = fixture(limit_pages=8)
    for number in range(10):
        cached.read(number, num_pages=8, keep=False)
    assert not cached.kept(*range(10))


def test_the_least_recently_used_copy_is_evicted() -> None:
    cached = fixture(limit_pages=8)
    for number in (1, 2, 3, 4):
        cached.read(number, num_pages=2)
    cached.cache.touch(label(1))
    cached.read(5, num_pages=2)
    assert cached.memory(3) is not None
    cached.read(6, num_pages=2)
    assert cached.kept(1, 2, 3, 4, 5, 6) == [1, 3, 5, 6]
    assert cached.metric("variant_evictions_total", level="host", reason="capacity") == 2
    assert cached.metric("host_cache_bytes") == 8 * PAGE_BYTES
    assert cached.metric("variants_resident", level="host") == 4
    assert cached.metric("variant_resident", variant="default/v2", level="host") is None


def test_a_tenant_with_many_deltas_replaces_its_own() -> None:
    cached = fixture(limit_pages=8)
    for number in (1, 2):
        cached.read(number, num_pages=2, tenant="few")
    for number in range(10, 30):
        cached.read(number, num_pages=2, tenant="many")
    labels = [record.label for record in cached.cache.records()]
    assert [label.split("/")[0] for label in labels] == ["few", "many", "many", "many"]
    # The other one has back what was its own.
    cached.read(1, num_pages=2, tenant="few")
    assert sum(record.tenant == "few" for record in cached.cache.records()) == 2


def test_a_larger_delta_replaces_neighbours() -> None:
    cached = fixture(limit_pages=8)
    for number in (1, 2, 3, 4):
        cached.read(number, num_pages=2)
    cached.read(5, num_pages=4)
    assert cached.kept(1, 2, 3, 4, 5) == [3, 4, 5]


def test_deltas_of_nearly_the_same_size_replace_each_other() -> None:
    cached = fixture(limit_pages=64, slot_pages=32)
    for number in (1, 2):
        cached.read(number, num_pages=25 + number)
    cached.read(3, num_pages=28)
    assert cached.kept(1, 2, 3) == [2, 3]


@pytest.mark.parametrize(("limit_pages", "num_pages"), [(0, 1), (2, 3)])
def test_what_is_above_the_limit_is_not_kept_and_evicts_nothing(limit_pages: int, num_pages: int) -> None:
    cached = fixture(limit_pages)
    if limit_pages:
        cached.read(1)
    cached.read(2, num_pages)
    assert cached.kept(1, 2) == [1][:limit_pages]


def test_copies_stay_below_a_limit_that_is_smaller_than_the_memory_of_the_loads() -> None:
    cached = fixture(limit_pages=2, num_loads=3)
    for number in range(6):
        cached.read(number)
    assert cached.kept(*range(6)) == [4, 5]
    assert cached.metric("host_cache_bytes") == 2 * PAGE_BYTES


def test_a_copy_in_use_is_not_evicted_and_a_buffer_waits_for_it() -> None:
    cached = fixture(limit_pages=8)
    cached.read(1, num_pages=4)
    with ThreadPoolExecutor(1) as thread:
        with cached.cache.copy_of(label(1)) as copy:
            assert copy is not None
            cached.read(2, num_pages=4)
            cached.read(3, num_pages=4)
            assert cached.kept(1, 2, 3) == [1, 3]
            waiting = thread.submit(cached.read, 4, 8)
            with pytest.raises(TimeoutError):
                waiting.result(0.1)
            assert bool((copy.memory == 1).all())
        waiting.result(WAIT_S)
    assert cached.kept(1, 2, 3, 4) == [4]


def test_a_copy_dropped_while_in_use_keeps_its_bytes_until_it_is_released() -> None:
    cached = fixture(limit_pages=8)
    cached.read(1, num_pages=4)
    with cached.cache.copy_of(label(1)) as copy:
        assert copy is not None
        cached.cache.drop(label(1), "unload")
        assert not cached.kept(1)
        cached.read(2, num_pages=4)
        assert bool((copy.memory == 1).all())
    cached.read(3, num_pages=8)
    assert cached.kept(1, 2, 3) == [3]


def test_a_copy_is_not_kept_if_copies_in_use_fill_the_limit() -> None:
    cached = fixture(limit_pages=2)
    cached.read(1, num_pages=2)
    with cached.cache.copy_of(label(1)):
        cached.read(2, num_pages=2)
    assert cached.kept(1, 2) == [1]


def test_a_buffer_waits_for_other_loads_and_gets_the_memory_that_they_free() -> None:
    cached = fixture(limit_pages=0)
    with ThreadPoolExecutor(1) as thread:
        with cached.cache.buffer(PAGE_BYTES):
            waiting = thread.submit(cached.read, 1, 8)
            with pytest.raises(TimeoutError):
                waiting.result(0.1)
        waiting.result(WAIT_S)


def test_a_load_that_is_not_staged_is_kept_if_memory_is_free() -> None:
    cached = fixture(limit_pages=8, is_staged=False)
    cached.read(1, num_pages=8)
    cached.read(2, num_pages=8)
    assert cached.kept(1, 2) == [2]


def test_a_load_that_is_not_staged_never_waits_and_takes_no_memory_beyond_the_limit() -> None:
    cached = fixture(limit_pages=4, is_staged=False)
    with cached.cache.buffer(5 * PAGE_BYTES) as above_the_limit:
        assert above_the_limit is None
    cached.read(1, num_pages=4)
    with cached.cache.copy_of(label(1)), cached.cache.buffer(PAGE_BYTES) as beside_a_copy_in_use:
        assert beside_a_copy_in_use is None
    assert cached.kept(1) == [1]


def test_a_delta_without_device_bytes_is_kept_too() -> None:
    cached = fixture(limit_pages=4)
    cached.read(1, num_pages=0)
    memory = cached.memory(1)
    assert memory is not None
    assert memory.numel() == 0


def test_memory_that_cannot_be_allocated_names_the_setting() -> None:
    with pytest.raises(SettingsError, match="lower --max-host-cache-gb"):
        fixture(limit_pages=1 << 48)


def test_under_many_threads_no_copy_changes_while_it_is_used() -> None:
    cached = fixture(limit_pages=8)
    # Residency loads a version once at a time.
    locks = [threading.Lock() for _ in range(12)]

    def use(seed: int) -> int:
        choose, wrong = random.Random(seed), 0
        for _ in range(300):
            number = choose.randrange(12)
            with locks[number]:
                with cached.cache.copy_of(label(number)) as copy:
                    if copy is not None:
                        wrong += int((copy.memory != number).sum())
                        continue
                cached.read(number, num_pages=choose.randint(1, 4))
                if choose.random() < 0.1:
                    cached.cache.drop(label(number), "unload")
        return wrong

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(use, range(4))) == 0
    for number in range(12):
        cached.cache.drop(label(number), "unload")
    cached.read(99, num_pages=8)
    assert cached.metric("host_cache_bytes") == 8 * PAGE_BYTES
    assert cached.metric("variants_resident", level="host") == 1


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.integers(0, 50)), max_size=60))
def test_ranges_never_overlap_and_merge_when_they_are_freed(steps: list[tuple[bool, int, int]]) -> None:
    memory = FreeList(100)
    taken: list[tuple[int, int]] = []
    for is_take, num_bytes, choice in steps:
        if is_take and (start := memory.allocate(num_bytes)) is not None:
            assert 0 <= start <= 100 - num_bytes
            assert all(start + num_bytes <= other or other + size <= start for other, size in taken)
            taken.append((start, num_bytes))
        elif taken:
            memory.free(*taken.pop(choice % len(taken)))
    for own in taken:
        memory.free(*own)
    assert memory.allocate(100) == 0
