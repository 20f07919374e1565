"""Share out the memory beside the base: pages of the KV cache, slots for deltas, and the host cache.

Sizes are bytes. On the CPU all of them come from host memory; on CUDA the host cache alone does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from server.errors import NotServable

# On CUDA, this share of free memory is taken; the rest is for activations.
CUDA_SHARE = 0.9
# On the CPU, this share of free memory is taken without being asked for, because other processes need memory, too.
CPU_SHARE = 0.5
# On the CPU, this is left for activations and libraries whatever is asked for.
RESERVE_BYTES = 10**9
# Taken unless more is asked for.
MOST_SLOTS = 64
MOST_HOST_CACHE = 16 * 10**9
# One can be pinned then, and another be loaded.
LEAST_SLOTS = 2
# One of them is padding.
LEAST_PAGES = 2
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Free:
    """Free memory of the device, beside the host cache."""

    usable: int  # what can be asked for
    unasked: int  # what is taken without being asked for


@dataclass(frozen=True, slots=True)
class Wanted:
    """Settings; None is what fits."""

    kv_cache_bytes: int | None
    num_slots: int | None
    max_tokens: int  # in the cache at most: of all sequences that may run


@dataclass(frozen=True, slots=True)
class Shares:
    """The result."""

    num_pages: int  # one of which is padding
    num_slots: int


def share_out(free: Free, page_bytes: int, page_tokens: int, slot_bytes: int, wanted: Wanted) -> Shares:
    """Give what was asked for; divide the unasked share between cache and slots, with two slots at least.

    Raises:
        NotServable: it does not fit; the message says how much is missing and which setting to lower.
    """
    most_pages = -(-wanted.max_tokens // page_tokens) + 1
    asked = (wanted.num_slots or 0) * slot_bytes + (wanted.kv_cache_bytes or 0)
    left = free.usable - asked
    least = (LEAST_SLOTS * slot_bytes if wanted.num_slots is None else 0) + (
        LEAST_PAGES * page_bytes if wanted.kv_cache_bytes is None else 0
    )
    room = max(0, min(left, max(free.unasked - asked, left // 2, least)))
    if wanted.kv_cache_bytes is not None:
        pages = wanted.kv_cache_bytes // page_bytes
    elif wanted.num_slots is not None:
        pages = min(most_pages, room // page_bytes)
    else:
        pages = min(most_pages, min(room // 2, max(0, room - LEAST_SLOTS * slot_bytes)) // page_bytes)
    unasked_pages = pages * page_bytes if wanted.kv_cache_bytes is None else 0
    slots = min(MOST_SLOTS, (room - unasked_pages) // slot_bytes)
    if wanted.num_slots is not None:
        slots = wanted.num_slots
    if wanted.kv_cache_bytes is not None and pages < LEAST_PAGES:
        raise NotServable(
            f"--kv-cache-gb {wanted.kv_cache_bytes / 1e9:g} holds less than two pages of {page_bytes / 1e6:.2f} MB: "
            "raise it"
        )
    if pages < LEAST_PAGES or slots < LEAST_SLOTS or left < 0:
        needed = max(slots, LEAST_SLOTS) * slot_bytes + max(pages, LEAST_PAGES) * page_bytes
        raise NotServable(
            f"{_gb(max(0, free.usable))} are left beside the base and {_gb(needed)} are needed at least, "
            f"{_gb(needed - free.usable)} more: slots take {_gb(slot_bytes)} each, pages of the KV cache "
            f"{page_bytes / 1e6:.2f} MB: "
            "lower --max-gpu-deltas, --kv-cache-gb, --max-host-cache-gb or --slot-headroom, or serve on a larger device"
        )
    return Shares(pages, slots)


def check_base(
    base_bytes: int,
    dtype: torch.dtype,
    device: torch.device,
    slot_bytes: int,
    wanted: Wanted,
    asked_host_cache: int | None,
) -> None:
    """Refuse a base that leaves no room for what was asked for, before it is read.

    Raises:
        NotServable: how much is missing, and which setting to lower.
    """
    slots = wanted.num_slots or LEAST_SLOTS
    host_cache = asked_host_cache or 0 if device.type == "cpu" else 0
    needed = base_bytes + slots * slot_bytes + (wanted.kv_cache_bytes or 0) + host_cache
    usable = _usable(device)
    if needed <= usable:
        return
    asked = (
        ("--max-gpu-deltas", wanted.num_slots),
        ("--kv-cache-gb", wanted.kv_cache_bytes),
        ("--max-host-cache-gb", host_cache),
    )
    lower = ", ".join(flag for flag, size in asked if size) or "--slot-headroom"
    if dtype == torch.float32:
        lower = f"--dtype to bfloat16, {lower}"
    raise NotServable(
        f"{_gb(max(0, usable))} of memory are free and {_gb(needed)} are needed, {_gb(needed - usable)} more: the "
        f"base takes {_gb(base_bytes)} in {str(dtype).removeprefix('torch.')}, {slots} slots "
        f"{_gb(slots * slot_bytes)}, KV cache and host cache {_gb((wanted.kv_cache_bytes or 0) + host_cache)} or more: "
        f"lower {lower}, or serve on a larger device"
    )


def free_memory(device: torch.device, host_cache_bytes: int) -> Free:
    """Return what is left of a device's memory now, beside the host cache."""
    if device.type == "cpu":
        usable = _usable(device) - host_cache_bytes
        return Free(usable, min(usable, int(available_bytes() * CPU_SHARE) - host_cache_bytes))
    usable = _usable(device)
    return Free(usable, usable)


def host_cache_bytes(asked: int | None) -> int:
    """Host memory for deltas without a slot: what was asked for, or an eighth of what is free, within reason."""
    return min(MOST_HOST_CACHE, available_bytes() // 8) if asked is None else asked


def available_bytes() -> int:
    """Host memory that can be taken without swapping: the machine's, or less where a control group has a limit."""
    # A machine that only runs the GPU bench need not have it.
    import psutil

    available = int(psutil.virtual_memory().available)
    return min([available, *map(_left_in, _control_groups())])


def _usable(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * CUDA_SHARE)
    return available_bytes() - RESERVE_BYTES


def _control_groups() -> list[Path]:
    """Directories of this process's control group and of those above it (version 2), if there are any."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if own is None:
        return []
    group = CGROUP / own
    return [path for path in (group, *group.parents) if path.is_relative_to(CGROUP)]


def _left_in(group: Path) -> int:
    """Bytes below a control group's limit; file pages that can be dropped count as free."""
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return 1 << 62
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 1 << 62
    return int(limit) - used + int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
