"""Checks of a base: that it can be read, its fingerprint, and how many variants fit beside it."""

from __future__ import annotations

import math

import torch

from deltastore.base.base import Base
from deltastore.base.checkpoint import Checkpoint
from deltastore.format.plan import one_bit_plan
from deltastore.quantities import size_text
from server.engine.build import DTYPES
from server.engine.memory import check_base, free_memory, host_cache_bytes, plan_memory, size_of_slot
from server.model.weights import own_dtype
from server.settings import Settings

# Pages of the KV cache are this small here: its share of the memory is all that matters.
PAGE_BYTES = 4096


def describe_base(base: Base, checkpoint: Checkpoint) -> str:
    """Return a base's id, fingerprint and size."""
    num_bytes = sum(stored.num_bytes for stored in checkpoint.tensors.values())
    return f"{base.id}, {size_text(num_bytes)}, fingerprint {base.fingerprint[:12]}"


def delta_bytes(base: Base) -> int:
    """Return the bytes of a delta with one bit per weight."""
    return one_bit_plan(base.shapes).device_bytes


def check_capacity(base: Base, checkpoint: Checkpoint, settings: Settings, device: torch.device) -> str:
    """Return how many deltas have a slot if a server with these settings starts now.

    Raises:
        NotServable: the memory is too small.
    """
    dtype = DTYPES[settings.dtype] or own_dtype(checkpoint)
    slot_bytes = size_of_slot(base.shapes, settings.slot_headroom)
    base_bytes = dtype.itemsize * sum(map(math.prod, base.shapes.values()))
    check_base(settings, device, dtype, base_bytes, slot_bytes)
    cache_bytes = host_cache_bytes(settings)
    free = free_memory(device, cache_bytes, base_bytes)
    # The number of pages is bounded by the free memory alone, so that the KV cache takes its whole share.
    plan = plan_memory(settings, free, slot_bytes, PAGE_BYTES, max(2, free.usable // PAGE_BYTES))
    return (
        f"at least {plan.num_slots} slots of {size_text(slot_bytes)} beside the base in "
        f"{str(dtype).removeprefix('torch.')}, and a host cache for {cache_bytes // slot_bytes} deltas"
    )
