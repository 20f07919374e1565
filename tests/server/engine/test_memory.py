"""The plan of memory for the KV cache, the slots and the host cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deltastore.errors import NotServable
from server.engine import build
from server.engine.build import FreeMemory, MemoryPlan, check_base, plan_memory
from server.settings import Settings

PAGE, SLOT = 1000, 30_000
CPU = torch.device("cpu")


def settings(kv: int | None = None, slots: int | None = None, host_cache: int | None = None) -> Settings:
    """Return settings for caches of these sizes in bytes and this number of slots."""
    return Settings(
        base=Path(),
        registry="registry",
        max_gpu_deltas=slots,
        kv_cache_gb=None if kv is None else kv / 1e9,
        max_host_cache_gb=None if host_cache is None else host_cache / 1e9,
    )


def plan(
    free: int,
    kv: int | None = None,
    slots: int | None = None,
    max_pages: int = 10**9,
    default: int | None = None,
) -> MemoryPlan:
    memory = FreeMemory(free, free if default is None else default)
    return plan_memory(settings(kv, slots), memory, SLOT, PAGE, max_pages)


def test_by_default_half_is_kv_cache_and_half_is_slots() -> None:
    assert plan(600_000) == MemoryPlan(num_pages=300, num_slots=10)


def test_the_kv_cache_takes_no_more_than_can_be_used_and_slots_get_the_rest() -> None:
    assert plan(600_000, max_pages=100) == MemoryPlan(num_pages=100, num_slots=16)


def test_a_setting_is_honoured_and_the_other_part_takes_what_is_left() -> None:
    assert plan(600_000, kv=90_000) == MemoryPlan(90, 17)
    assert plan(600_000, slots=3) == MemoryPlan(510, 3)
    assert plan(600_000, kv=90_000, slots=3) == MemoryPlan(90, 3)


def test_more_than_the_default_slots_are_taken_only_when_asked_for() -> None:
    assert plan(10**9).num_slots == 64
    assert plan(10**9, slots=500).num_slots == 500


def test_two_slots_come_before_half_for_the_kv_cache() -> None:
    assert plan(80_000) == MemoryPlan(num_pages=20, num_slots=2)


def test_the_default_share_leaves_memory_that_settings_can_ask_for() -> None:
    assert plan(600_000, default=300_000) == MemoryPlan(150, 5)
    assert plan(600_000, kv=90_000, slots=15, default=300_000) == MemoryPlan(90, 15)


def test_two_slots_and_two_pages_come_before_the_default_share() -> None:
    assert plan(70_000, kv=5000, default=10_000) == MemoryPlan(5, 2)
    assert plan(62_000, default=31_000) == MemoryPlan(2, 2)


def test_half_of_the_rest_is_taken_if_settings_ask_for_much() -> None:
    assert plan(600_000, slots=15, default=300_000) == MemoryPlan(75, 15)


@pytest.mark.parametrize(
    ("free", "kv", "slots"),
    [(60_000, None, 2), (60_000, 59_000, None), (600_000, 400_000, 8), (1500, None, None)],
)
def test_a_plan_that_does_not_fit_is_refused_with_the_settings_to_lower(
    free: int, kv: int | None, slots: int | None
) -> None:
    with pytest.raises(NotServable, match=r"B more: .*lower --max-gpu-deltas, --kv-cache-gb"):
        plan(free, kv, slots)


def test_a_kv_cache_of_less_than_two_pages_is_refused() -> None:
    with pytest.raises(NotServable, match="raise it"):
        plan(600_000, kv=1500)


def test_a_base_that_fits_beside_the_settings_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "available_bytes", lambda: 8 * 10**9)
    check_base(settings(10**9, 2, 0), CPU, torch.bfloat16, 4 * 10**9, 10**9)


def test_a_base_too_large_for_memory_is_refused_with_the_missing_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "available_bytes", lambda: 8 * 10**9)
    with pytest.raises(NotServable, match=r"7\.00GB of memory are free .*9\.50GB are needed, 2\.50GB more"):
        check_base(settings(15 * 10**8, 4), CPU, torch.bfloat16, 4 * 10**9, 10**9)
    with pytest.raises(NotServable, match=r"1\.00GB more.*lower --max-host-cache-gb, or"):
        check_base(settings(host_cache=2 * 10**9), CPU, torch.bfloat16, 4 * 10**9, 10**9)
    with pytest.raises(NotServable, match="lower --dtype to bfloat16"):
        check_base(settings(), CPU, torch.float32, 16 * 10**9, 10**9)


def test_a_base_is_divided_among_as_many_devices_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * 10**9, 10**10))
    cuda = torch.device("cuda")
    two, three = (
        settings().model_copy(update={"backend": "vllm", "tensor_parallel_size": number}) for number in (2, 3)
    )
    check_base(two, cuda, torch.bfloat16, 14 * 10**9, 10**9)
    with pytest.raises(NotServable, match="lower"):
        check_base(settings(), cuda, torch.bfloat16, 14 * 10**9, 10**9)
    with pytest.raises(NotServable, match="is 3 and there are 2 CUDA devices: lower it to 2"):
        check_base(three, cuda, torch.bfloat16, 14 * 10**9, 10**9)
    assert build.free_memory(cuda, 10**9, 10**9, 2).usable == 17 * 10**9
