"""Build an engine from settings: load the base, divide the memory, connect the parts.

The KV cache, the slots for deltas and the host cache share the memory beside the base. On the CPU all three come from
host memory; on CUDA only the host cache does.
"""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import dataclass

import torch

from deltastore.checkpoint import Checkpoint
from deltastore.console import size_text
from deltastore.errors import NotServable
from deltastore.loader import Loader
from deltastore.memory import available_bytes
from deltastore.registry import Registry
from deltastore.servable import own_dtype
from server.deltas.fetcher import Fetcher, HostCache
from server.deltas.residency import Residency
from server.deltas.resident import Slot, arena, size_of_slot
from server.engine.clients import EngineSocket
from server.engine.core import EngineCore, RequestLimits
from server.engine.engine import Engine
from server.engine.kv_cache_manager import KVCacheManager
from server.engine.model_runner import ModelRunner
from server.engine.scheduler import Scheduler
from server.engine.slot_policy import SchedulerConstants
from server.metrics.metrics import EngineMetrics, ResidencyMetrics, Telemetry
from server.model.loader import ServedModel, load_model
from server.protocol.messages import EngineFacts
from server.settings import Settings

# On CUDA, use at most this share of free memory; activations need the rest.
CUDA_SHARE = 0.9
# On the CPU, use at most this share of free memory unless settings ask for more: other processes need memory, too.
CPU_SHARE = 0.5
# On the CPU, always leave this much for activations and libraries.
RESERVE_BYTES = 10**9
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
        device: the device that holds the base, or each rank's part of it.
        dtype: dtype of the base's weights.
        base_bytes: size of the base's weights in `dtype`.
        slot_bytes: size of one slot.

    Raises:
        NotServable: it does not fit, or there are fewer devices than ranks. The message tells how much is missing and
            which settings to lower.
    """
    num_ranks = settings.tensor_parallel_size
    if device.type == "cuda" and (num_devices := torch.cuda.device_count()) < num_ranks:
        raise NotServable(
            f"--tensor-parallel-size is {num_ranks} and there are {num_devices} CUDA devices: lower it to {num_devices}"
        )
    num_slots = settings.max_gpu_deltas or MIN_SLOTS
    kv_cache = settings.kv_cache_bytes or 0
    host_cache = settings.max_host_cache_bytes or 0 if device.type == "cpu" else 0
    needed = base_bytes + num_slots * slot_bytes + kv_cache + host_cache
    usable = _usable_bytes(device, num_ranks)
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


def free_memory(
    device: torch.device, host_cache_bytes: int, base_bytes: int = 0, num_ranks: int = 1
) -> FreeMemory:
    """Return the memory of all ranks' devices that is free now, less `base_bytes`.

    On the CPU, ranks share the host's memory, and it is less `host_cache_bytes`, too.
    """
    usable = _usable_bytes(device, num_ranks) - base_bytes
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


def _usable_bytes(device: torch.device, num_ranks: int) -> int:
    if device.type == "cuda":
        # Each rank's device is taken to be like this one.
        return int(torch.cuda.mem_get_info(device)[0] * CUDA_SHARE) * num_ranks
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


log = logging.getLogger(__name__)

# Two loads from disk at once: while one waits for its file or its copy, the other keeps the disk busy.
NUM_LOADS = 2
# Default of max_batch_tokens by device: a prefill chunk of this size delays the next token of other sequences.
BATCH_TOKENS = {"cpu": 128, "cuda": 2048}
# How long a constrained sequence waits for its mask before its request fails.
MASK_S = 30.0
DTYPES = {"auto": None, "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def build_engine(
    settings: Settings,
    registry: Registry,
    metrics: EngineMetrics,
    socket: EngineSocket,
    stopping: threading.Event,
) -> Engine:
    """Load the base and build the engine that serves it on `socket`. Takes as long as reading the checkpoint.

    Setting `stopping` ends loading early.

    Raises:
        CheckpointError: the base cannot be read.
        NotServable: the architecture or the device is not supported, or the memory is too small.
        Draining: `stopping` was set.
    """
    device = device_of(settings.device)
    model, slot_bytes = _load_base(settings, device, stopping)
    slots, kv_cache, cache_bytes = _allocate(settings, metrics, model, slot_bytes)
    residency_metrics = ResidencyMetrics(metrics)
    host_cache = host_cache_of(cache_bytes, slot_bytes, device, residency_metrics)
    loader = Loader(device, settings.load_threads)
    fetcher = Fetcher(loader, host_cache, registry, model.context.tables)
    residency = Residency(slots, fetcher, residency_metrics, on_load_ended=socket.wake)
    constants = SchedulerConstants(context_tokens=model.context_tokens)
    scheduler = Scheduler(
        kv_cache, residency, settings.max_num_seqs, max_batch_tokens(settings, device), constants
    )
    longest = min(_longest_context(settings, model) or kv_cache.max_tokens, kv_cache.max_tokens)
    limits = request_limits(settings, _max_model_len(settings, model, kv_cache), longest)
    core = EngineCore(ModelRunner(model), scheduler, residency, Telemetry(metrics), limits)
    unread = model.context.tables.unread(model.base)
    facts = EngineFacts(
        model.base, limits.max_model_len, slot_bytes, len(slots), kv_cache.page_tokens, unread, longest
    )
    return Engine(core, residency, socket, facts, metrics)


def _load_base(
    settings: Settings, device: torch.device, stopping: threading.Event
) -> tuple[ServedModel, int]:
    """Check that the base fits, then load it. Return it with the size of a slot in bytes."""
    checkpoint = Checkpoint.open(settings.base)
    dtype, slot_bytes, _ = base_sizes(settings, checkpoint, device)
    model = load_model(checkpoint, device, dtype, stopping)
    if device.type == "cuda":
        # Otherwise the memory that the start-up probe used would count as taken.
        torch.cuda.empty_cache()
    return model, slot_bytes


def base_sizes(
    settings: Settings, checkpoint: Checkpoint, device: torch.device
) -> tuple[torch.dtype, int, int]:
    """Check that a base fits before it is read. Return its dtype, and the bytes of a slot and of the base.

    Raises:
        NotServable: it does not fit.
    """
    shapes = checkpoint.shapes()
    dtype = DTYPES[settings.dtype] or own_dtype(checkpoint)
    slot_bytes = size_of_slot(shapes, settings.slot_headroom)
    base_bytes = dtype.itemsize * sum(map(math.prod, shapes.values()))
    check_base(settings, device, dtype, base_bytes, slot_bytes)
    log.info("reading the base: %s in %s", size_text(base_bytes), str(dtype).removeprefix("torch."))
    return dtype, slot_bytes, base_bytes


def _allocate(
    settings: Settings, metrics: EngineMetrics, model: ServedModel, slot_bytes: int
) -> tuple[list[Slot], KVCacheManager, int]:
    """Divide the free memory. Return the slots, the KV cache and the size of the host cache in bytes."""
    attention = model.attention
    cache_bytes = host_cache_bytes(settings)
    free = free_memory(model.device, cache_bytes)
    # Pages that all running sequences can use, and the padding page.
    longest = _longest_context(settings, model) if settings.max_model_len else model.max_positions
    max_tokens = settings.max_num_seqs * (longest or model.max_positions)
    max_pages = -(-max_tokens // attention.page_tokens) + 1
    page_bytes = attention.page_tokens * attention.bytes_per_token
    memory = plan_memory(settings, free, slot_bytes, page_bytes, max_pages)
    attention.allocate(memory.num_pages)
    slots = arena(memory.num_slots, slot_bytes, model.device)
    model.context.allocate(memory.num_slots, max_batch_tokens(settings, model.device), model.device)
    kv_cache = KVCacheManager(memory.num_pages, attention.page_tokens)
    metrics.host_cache_limit_bytes.set(cache_bytes)
    _report_memory(metrics, model, slots, kv_cache, _max_model_len(settings, model, kv_cache))
    return slots, kv_cache, cache_bytes


def _max_positions(settings: Settings, model: ServedModel) -> int:
    return min(settings.max_model_len or model.max_positions, model.max_positions)


def _longest_context(settings: Settings, model: ServedModel) -> int | None:
    """Return the tokens of the longest context of a variant; None where only the KV cache bounds it."""
    bounds = [bound for bound in (settings.max_model_len, model.position_limit) if bound is not None]
    return min(bounds, default=None)


def _max_model_len(settings: Settings, model: ServedModel, kv_cache: KVCacheManager) -> int:
    return min(_max_positions(settings, model), kv_cache.max_tokens)


def _report_memory(
    metrics: EngineMetrics,
    model: ServedModel,
    slots: list[Slot],
    kv_cache: KVCacheManager,
    max_model_len: int,
) -> None:
    """Log the sizes that were chosen, and set the gauges of device memory."""
    attention = model.attention
    slot_bytes = len(slots[0].memory)
    # One page more is padding.
    kv_bytes = (kv_cache.num_pages + 1) * attention.page_tokens * attention.bytes_per_token
    log.info(
        "%d slots of %s; a KV cache of %s for %d tokens; a request may have %d of the model's %d positions",
        len(slots),
        size_text(slot_bytes),
        size_text(kv_bytes),
        kv_cache.max_tokens,
        max_model_len,
        model.max_positions,
    )
    metrics.slots.set(len(slots))
    metrics.vllm.show_sizes(len(slots), attention.page_tokens, kv_cache.num_pages)
    used = {"slots": len(slots) * slot_bytes, "kv": kv_bytes, "base": model.weight_bytes}
    for kind, num_bytes in used.items():
        metrics.device_memory_bytes.labels(kind=kind).set(num_bytes)


def host_cache_of(
    cache_bytes: int, slot_bytes: int, device: torch.device, metrics: ResidencyMetrics
) -> HostCache:
    # Copies to CUDA need pinned host memory; on the CPU a delta is read straight into its slot.
    is_staged = device.type == "cuda"
    return HostCache(cache_bytes, slot_bytes, NUM_LOADS, device, metrics, is_staged=is_staged)


def max_batch_tokens(settings: Settings, device: torch.device) -> int:
    """Return the setting, or the device's default, at least twice `max_num_seqs`."""
    return settings.max_batch_tokens or max(BATCH_TOKENS[device.type], 2 * settings.max_num_seqs)


def request_limits(settings: Settings, max_model_len: int, longest: int) -> RequestLimits:
    """Return the bounds on requests; without keys there is one tenant, which may have all places.

    Args:
        max_model_len: tokens of prompt and output together, for the base.
        longest: the same of a variant with a longer context.
    """
    max_open, has_shares = settings.max_num_seqs + settings.max_queue, settings.auth == "keys"
    return RequestLimits(max_open, has_shares, max_model_len, settings.load_timeout, MASK_S, longest)


def device_of(name: str) -> torch.device:
    """Return the device that the setting `device` names.

    Raises:
        NotServable: torch finds no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise NotServable("--device cuda: torch finds no CUDA device here: use --device cpu")
    return torch.device(name)
