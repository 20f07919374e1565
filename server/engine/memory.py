"""Divide the memory beside the base between the KV cache, the slots for deltas and the host cache.

Sizes are bytes. On the CPU all three come from host memory; on CUDA only the host cache does. This file allocates
nothing and knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from deltastore.errors import NotServable
from deltastore.format.plan import one_bit_plan
from deltastore.host_memory import available_bytes
from deltastore.quantities import size_text
from server.settings import Settings

# On CUDA, use at most this share of free memory; activations need the rest.
CUDA_SHARE = 0.9
# On the CPU, use at most this share of free memory unless settings ask for more: other processes need memory, too.
CPU_SHARE = 0.5
# On the CPU, always leave this much for activations and libraries.
RESERVE_BYTES = 10**9
SLOT_ALIGNMENT = 4096
# Upper bounds of the defaults; settings may ask for more.
DEFAULT_MAX_SLOTS = 64
DEFAULT_MAX_HOST_CACHE_BYTES = 16 * 10**9
# With two slots, one variant can be pinned while another loads.
MIN_SLOTS = 2
# Page 0 is padding, so a cache of one page would hold no token.
MIN_PAGES = 2


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Free bytes of the device, after the host cache has its part."""

    usable: int  # upper bound for what settings ask for
    default: int  # upper bound for what is taken without being asked for


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The numbers of pages and slots to allocate."""

    num_pages: int  # including the padding page
    num_slots: int


def plan_memory(
    settings: Settings, free: FreeMemory, slot_bytes: int, page_bytes: int, max_pages: int
) -> MemoryPlan:
    """Divide free memory between the KV cache and the slots.

    What a setting asks for is given. Without `kv_cache_gb` and `max_gpu_deltas`, half of the default share is the KV
    cache's and the rest is for slots, of which there are at least two.

    Args:
        settings: `max_gpu_deltas` and `kv_cache_gb` are read.
        free: free memory of the device.
        slot_bytes: size of one slot.
        page_bytes: size of one page of the KV cache.
        max_pages: pages that can be in use at once, including the padding page.

    Raises:
        NotServable: the memory is too small. The message tells how much is missing and which settings to lower.
    """
    unasked = _unasked_bytes(settings, free, slot_bytes, page_bytes)
    if settings.kv_cache_bytes is not None:
        num_pages = settings.kv_cache_bytes // page_bytes
        if num_pages < MIN_PAGES:
            raise _cache_too_small(settings.kv_cache_bytes, page_bytes)
    else:
        share = unasked
        if settings.max_gpu_deltas is None:
            share = min(unasked // 2, max(0, unasked - MIN_SLOTS * slot_bytes))
        num_pages = min(max_pages, share // page_bytes)
        unasked -= num_pages * page_bytes
    num_slots = settings.max_gpu_deltas or min(DEFAULT_MAX_SLOTS, unasked // slot_bytes)
    needed = max(num_slots, MIN_SLOTS) * slot_bytes + max(num_pages, MIN_PAGES) * page_bytes
    if num_pages < MIN_PAGES or num_slots < MIN_SLOTS or _asked_bytes(settings, slot_bytes) > free.usable:
        raise _too_small(free.usable, needed, slot_bytes, page_bytes)
    return MemoryPlan(num_pages, num_slots)


def check_base(
    settings: Settings, device: torch.device, dtype: torch.dtype, base_bytes: int, slot_bytes: int
) -> None:
    """Check, before the base is read, that it fits beside what the settings ask for.

    Args:
        settings: the memory that was asked for.
        device: the device that holds the base.
        dtype: dtype of the base's weights.
        base_bytes: size of the base's weights in `dtype`.
        slot_bytes: size of one slot.

    Raises:
        NotServable: it does not fit. The message tells how much is missing and which settings to lower.
    """
    num_slots = settings.max_gpu_deltas or MIN_SLOTS
    kv_cache = settings.kv_cache_bytes or 0
    host_cache = settings.max_host_cache_bytes or 0 if device.type == "cpu" else 0
    needed = base_bytes + num_slots * slot_bytes + kv_cache + host_cache
    usable = _usable_bytes(device)
    if needed <= usable:
        return
    asked = (
        ("--max-gpu-deltas", settings.max_gpu_deltas),
        ("--kv-cache-gb", kv_cache),
        ("--max-host-cache-gb", host_cache),
    )
    flags = [flag for flag, value in asked if value] or ["--slot-headroom"]
    if dtype == torch.float32:
        flags.insert(0, "--dtype to bfloat16")
    raise NotServable(
        f"{size_text(max(0, usable))} of memory are free and {size_text(needed)} are needed, "
        f"{size_text(needed - usable)} more: the base takes {size_text(base_bytes)} in "
        f"{str(dtype).removeprefix('torch.')}, {num_slots} slots "
        f"{size_text(num_slots * slot_bytes)}, KV cache and host cache {size_text(kv_cache + host_cache)} or more: "
        f"lower {', '.join(flags)}, or serve on a larger device"
    )


def size_of_slot(shapes: Mapping[str, tuple[int, ...]], headroom: float) -> int:
    """Return the bytes of a slot: the one-bit plan of these shapes times `headroom`, rounded up to `SLOT_ALIGNMENT`."""
    plan = one_bit_plan(shapes)
    return -(-int(plan.device_bytes * headroom) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def free_memory(device: torch.device, host_cache_bytes: int, base_bytes: int = 0) -> FreeMemory:
    """Return the device's memory that is free now, less `base_bytes`; on the CPU, also less `host_cache_bytes`."""
    usable = _usable_bytes(device) - base_bytes
    if device.type == "cpu":
        usable -= host_cache_bytes
        default = int((available_bytes() - base_bytes) * CPU_SHARE) - host_cache_bytes
        return FreeMemory(usable, min(usable, default))
    return FreeMemory(usable, usable)


def host_cache_bytes(settings: Settings) -> int:
    """Return the size of the host cache: `max_host_cache_gb`, else an eighth of free host memory, at most 16 GB."""
    if settings.max_host_cache_bytes is not None:
        return settings.max_host_cache_bytes
    return min(DEFAULT_MAX_HOST_CACHE_BYTES, available_bytes() // 8)


def _asked_bytes(settings: Settings, slot_bytes: int) -> int:
    return (settings.max_gpu_deltas or 0) * slot_bytes + (settings.kv_cache_bytes or 0)


def _unasked_bytes(settings: Settings, free: FreeMemory, slot_bytes: int, page_bytes: int) -> int:
    """Return the bytes for what no setting asks for: the default share, half of what is left, or the minimum."""
    asked = _asked_bytes(settings, slot_bytes)
    left = free.usable - asked
    min_slots = MIN_SLOTS if settings.max_gpu_deltas is None else 0
    min_pages = MIN_PAGES if settings.kv_cache_bytes is None else 0
    minimum = min_slots * slot_bytes + min_pages * page_bytes
    return max(0, min(left, max(free.default - asked, left // 2, minimum)))


def _usable_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * CUDA_SHARE)
    return available_bytes() - RESERVE_BYTES


def _cache_too_small(kv_cache_bytes: int, page_bytes: int) -> NotServable:
    return NotServable(
        f"--kv-cache-gb {kv_cache_bytes / 1e9:g} holds less than two pages of {size_text(page_bytes)}: raise it"
    )


def _too_small(usable: int, needed: int, slot_bytes: int, page_bytes: int) -> NotServable:
    return NotServable(
        f"{size_text(max(0, usable))} are left beside the base and {size_text(needed)} are needed at least, "
        f"{size_text(needed - usable)} more: slots take {size_text(slot_bytes)} each, pages of the KV cache "
        f"{size_text(page_bytes)}: lower --max-gpu-deltas, --kv-cache-gb, --max-host-cache-gb or --slot-headroom, "
        "or serve on a larger device"
    )
