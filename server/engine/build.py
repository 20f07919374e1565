"""Build an engine from settings: load the base, divide the memory, connect the parts."""

from __future__ import annotations

import logging
import math
import threading

import torch

from deltastore.base.checkpoint import Checkpoint
from deltastore.base.servable import own_dtype
from deltastore.errors import NotServable
from deltastore.loader import Loader
from deltastore.quantities import size_text
from deltastore.registry import Registry
from server.deltas.fetcher import Fetcher
from server.deltas.host_cache import HostCache
from server.deltas.residency import Residency
from server.deltas.residency_metrics import ResidencyMetrics
from server.deltas.resident import Slot, arena
from server.engine.core import EngineCore, RequestLimits
from server.engine.engine import Engine
from server.engine.engine_socket import EngineSocket
from server.engine.memory import check_base, free_memory, host_cache_bytes, plan_memory, size_of_slot
from server.engine.model_runner import ModelRunner
from server.engine.scheduling.kv_cache_manager import KVCacheManager
from server.engine.scheduling.scheduler import Scheduler
from server.engine.telemetry import Telemetry
from server.metrics.engine import EngineMetrics
from server.model.loader import ServedModel, load_model
from server.protocol.messages import EngineFacts
from server.settings import Settings

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
    host_cache = _host_cache(cache_bytes, slot_bytes, device, residency_metrics)
    fetcher = Fetcher(Loader(device, settings.load_threads), host_cache, registry)
    residency = Residency(slots, fetcher, residency_metrics, on_load_ended=socket.wake)
    scheduler = Scheduler(kv_cache, residency, settings.max_num_seqs, _max_batch_tokens(settings, device))
    max_open = settings.max_num_seqs + settings.max_queue
    max_model_len = _max_model_len(settings, model, kv_cache)
    limits = RequestLimits(max_open, max_model_len, settings.load_timeout, MASK_S)
    core = EngineCore(ModelRunner(model), scheduler, residency, Telemetry(metrics), limits)
    facts = EngineFacts(model.base, limits.max_model_len, slot_bytes, len(slots))
    return Engine(core, residency, socket, facts, metrics)


def _load_base(
    settings: Settings, device: torch.device, stopping: threading.Event
) -> tuple[ServedModel, int]:
    """Check that the base fits, then load it. Return it with the size of a slot in bytes."""
    checkpoint = Checkpoint.open(settings.base)
    shapes = checkpoint.shapes()
    dtype = DTYPES[settings.dtype] or own_dtype(checkpoint)
    slot_bytes = size_of_slot(shapes, settings.slot_headroom)
    base_bytes = dtype.itemsize * sum(map(math.prod, shapes.values()))
    check_base(settings, device, dtype, base_bytes, slot_bytes)
    log.info("reading the base: %s in %s", size_text(base_bytes), str(dtype).removeprefix("torch."))
    model = load_model(checkpoint, device, dtype, stopping)
    if device.type == "cuda":
        # Otherwise the memory that the start-up probe used would count as taken.
        torch.cuda.empty_cache()
    return model, slot_bytes


def _allocate(
    settings: Settings, metrics: EngineMetrics, model: ServedModel, slot_bytes: int
) -> tuple[list[Slot], KVCacheManager, int]:
    """Divide the free memory. Return the slots, the KV cache and the size of the host cache in bytes."""
    attention = model.attention
    cache_bytes = host_cache_bytes(settings)
    free = free_memory(model.device, cache_bytes)
    # Pages that all running sequences can use, and the padding page.
    max_tokens = settings.max_num_seqs * _max_positions(settings, model)
    max_pages = -(-max_tokens // attention.page_tokens) + 1
    page_bytes = attention.page_tokens * attention.bytes_per_token
    memory = plan_memory(settings, free, slot_bytes, page_bytes, max_pages)
    attention.allocate(memory.num_pages)
    slots = arena(memory.num_slots, slot_bytes, model.device)
    kv_cache = KVCacheManager(memory.num_pages, attention.page_tokens)
    metrics.host_cache_limit_bytes.set(cache_bytes)
    _report_memory(metrics, model, slots, kv_cache, _max_model_len(settings, model, kv_cache))
    return slots, kv_cache, cache_bytes


def _max_positions(settings: Settings, model: ServedModel) -> int:
    return min(settings.max_model_len or model.max_positions, model.max_positions)


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


def _host_cache(
    cache_bytes: int, slot_bytes: int, device: torch.device, metrics: ResidencyMetrics
) -> HostCache:
    # Copies to CUDA need pinned host memory; on the CPU a delta is read straight into its slot.
    is_staged = device.type == "cuda"
    return HostCache(cache_bytes, slot_bytes, NUM_LOADS, device, metrics, is_staged=is_staged)


def _max_batch_tokens(settings: Settings, device: torch.device) -> int:
    """Return the setting, or the device's default, at least twice `max_num_seqs`."""
    return settings.max_batch_tokens or max(BATCH_TOKENS[device.type], 2 * settings.max_num_seqs)


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
