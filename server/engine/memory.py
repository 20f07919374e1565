"""How memory is shared out beside the base: pages of the key-value cache, and slots for deltas."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from server.errors import NotServable

USABLE = {
    "cuda": 0.9,
    "cpu": 0.5,
}  # of what is free; the rest is for activations, and on the CPU for everybody else
MOST_SLOTS = 64  # that are taken unasked
MOST_HOST_CACHE = 16 * 10**9  # that is taken unasked
LEAST_SLOTS = 2  # so that one can be pinned


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for; None is what fits."""

    kv_cache_bytes: int | None
    num_slots: int | None
    max_tokens: int  # in the cache at most: of all sequences that may run


@dataclass(frozen=True, slots=True)
class Shares:
    """What there will be."""

    num_pages: int  # one of which is padding
    num_slots: int


def share_out(free_bytes: int, page_bytes: int, page_tokens: int, slot_bytes: int, wanted: Wanted) -> Shares:
    """Divide `free_bytes`: what was asked for first, then half of the rest to the cache, at most what it can use.

    Raises:
        NotServable: what was asked for does not fit.
    """
    most_pages = -(-wanted.max_tokens // page_tokens) + 1
    asked_slots = (wanted.num_slots or 0) * slot_bytes
    if wanted.kv_cache_bytes is None:
        room = free_bytes - asked_slots
        pages = min(most_pages, (room if wanted.num_slots else room // 2) // page_bytes)
    else:
        pages = wanted.kv_cache_bytes // page_bytes
    left = free_bytes - pages * page_bytes
    slots = min(MOST_SLOTS, left // slot_bytes) if wanted.num_slots is None else wanted.num_slots
    sizes = f"pages of the key-value cache take {page_bytes / 1e6:.2f} MB, slots {slot_bytes / 1e6:.2f} MB"
    if wanted.kv_cache_bytes is not None and pages < 2:
        raise NotServable(
            f"--kv-cache-gb {wanted.kv_cache_bytes / 1e9:g} holds less than two pages: {sizes}: raise it"
        )
    if pages < 2 or slots < LEAST_SLOTS or slots * slot_bytes > left:
        raise NotServable(
            f"{max(free_bytes, 0) / 1e9:.2f} GB are left to serve with, and {sizes}: lower --max-gpu-deltas, "
            "--kv-cache-gb or --max-host-cache-gb, or serve on a larger device"
        )
    return Shares(pages, slots)


def free_bytes(device: torch.device, host_cache_bytes: int) -> int:
    """What may be taken of a device's memory now, beside the host cache."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * USABLE["cuda"])
    return int(_available() * USABLE["cpu"]) - host_cache_bytes


def host_cache_bytes(asked: int | None) -> int:
    """Host memory for deltas without a slot: what was asked for, or an eighth of what is free, within reason."""
    return min(MOST_HOST_CACHE, _available() // 8) if asked is None else asked


def _available() -> int:
    import psutil  # not where there is a GPU alone, as for its bench

    return int(psutil.virtual_memory().available)
