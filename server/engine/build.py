"""Build an engine from settings: load the base, divide the memory, connect the parts.

This file knows every part of the engine and their order. It knows no request and no HTTP.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping

import torch

from deltastore.base.checkpoint import Checkpoint
from deltastore.format.plan import one_bit_plan
from deltastore.loader import Loader
from deltastore.registry import Registry
from server.deltas.fetcher import Fetcher
from server.deltas.host_cache import HostCache
from server.deltas.residency import Residency
from server.deltas.residency_metrics import ResidencyMetrics
from server.deltas.resident import Slot, arena
from server.engine.admission import Admission
from server.engine.call_queue import CallQueue
from server.engine.core import Core
from server.engine.engine import Engine
from server.engine.memory import MemoryPlan, check_base, free_memory, host_cache_bytes, plan_memory
from server.engine.model_runner import ModelRunner
from server.engine.scheduling.kv_cache import KVCache
from server.engine.scheduling.scheduler import Scheduler
from server.engine.telemetry import Telemetry
from server.errors import NotServable
from server.metrics import Metrics
from server.model.loader import ServedModel, load_model
from server.model.weights import own_dtype
from server.settings import Settings
from server.text.templates import TemplateWorker
from server.text.tokenizer import Tokenizers

log = logging.getLogger(__name__)

SLOT_ALIGNMENT = 4096
# Two loads from disk at once: while one waits for its file or its copy, the other keeps the disk busy.
NUM_LOADS = 2
# Default of max_batch_tokens by device: a prefill chunk of this size delays the next token of other sequences.
BATCH_TOKENS = {"cpu": 128, "cuda": 2048}
DTYPES = {"auto": None, "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def build_engine(
    settings: Settings,
    registry: Registry,
    metrics: Metrics,
    stopping: threading.Event,
    on_lost: Callable[[], None],
) -> tuple[Engine, Tokenizers]:
    """Load the base and start the engine. Takes as long as reading the checkpoint.

    Args:
        settings: the settings of `peraxis serve`.
        registry: the registry that deltas are loaded from.
        metrics: the metrics that the engine updates.
        stopping: an event that ends loading early when it is set.
        on_lost: called on the engine's thread when the device is lost.

    Returns:
        The running engine, and the tokenizers of the base and its variants.

    Raises:
        CheckpointError: the base cannot be read.
        NotServable: the architecture or the device is not supported, or the memory is too small.
        Draining: `stopping` was set.
    """
    device = _device(settings.device)
    model, slot_bytes = _load_base(settings, device, stopping)
    cache_bytes = host_cache_bytes(settings)
    memory = _plan_memory(settings, model, slot_bytes, cache_bytes)
    model.attention.allocate(memory.num_pages)
    kv_cache = KVCache(memory.num_pages, model.attention.page_tokens)
    slots = arena(memory.num_slots, slot_bytes, device)
    max_model_len = min(_max_positions(settings, model), kv_cache.max_tokens)
    _report_memory(metrics, model, slots, kv_cache, max_model_len)
    metrics.host_cache_limit_bytes.set(cache_bytes)
    calls = CallQueue()
    residency_metrics = ResidencyMetrics(metrics)
    fetcher = _fetcher(settings, registry, residency_metrics, slots, cache_bytes)
    residency = Residency(slots, fetcher, residency_metrics, on_load_ended=calls.wake)
    scheduler = Scheduler(kv_cache, residency, settings.max_num_seqs, _max_batch_tokens(settings, device))
    telemetry = Telemetry(metrics)
    tokenizers = Tokenizers(settings.base, model.base, registry, TemplateWorker())
    admission = Admission(tokenizers, telemetry, settings.max_num_seqs + settings.max_queue, max_model_len)
    core = Core(
        ModelRunner(model),
        scheduler,
        residency,
        telemetry,
        load_timeout_s=settings.load_timeout,
        on_answered=admission.remove,
    )
    return Engine(core, calls, admission, residency, model.base, on_lost), tokenizers


def _load_base(
    settings: Settings, device: torch.device, stopping: threading.Event
) -> tuple[ServedModel, int]:
    """Check that the base fits, then load it. Return it with the size of a slot in bytes."""
    checkpoint = Checkpoint.open(settings.base)
    shapes = checkpoint.shapes()
    dtype = DTYPES[settings.dtype] or own_dtype(checkpoint)
    slot_bytes = _slot_bytes(shapes, settings.slot_headroom)
    base_bytes = dtype.itemsize * sum(map(math.prod, shapes.values()))
    check_base(settings, device, dtype, base_bytes, slot_bytes)
    model = load_model(checkpoint, device, dtype, stopping)
    if device.type == "cuda":
        # Otherwise the memory that the start-up probe used would count as taken.
        torch.cuda.empty_cache()
    return model, slot_bytes


def _slot_bytes(shapes: Mapping[str, tuple[int, ...]], headroom: float) -> int:
    """Return the size of a slot: the one-bit plan of these shapes times `headroom`, rounded up to `SLOT_ALIGNMENT`."""
    plan = one_bit_plan(shapes)
    return -(-int(plan.device_bytes * headroom) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def _plan_memory(settings: Settings, model: ServedModel, slot_bytes: int, cache_bytes: int) -> MemoryPlan:
    """Plan pages and slots: pages for at most `max_num_seqs` sequences of the longest length, and the padding page."""
    attention = model.attention
    max_tokens = settings.max_num_seqs * _max_positions(settings, model)
    free = free_memory(model.device, cache_bytes)
    page_bytes = attention.page_tokens * attention.bytes_per_token
    return plan_memory(settings, free, slot_bytes, page_bytes, -(-max_tokens // attention.page_tokens) + 1)


def _max_positions(settings: Settings, model: ServedModel) -> int:
    return min(settings.max_model_len or model.max_positions, model.max_positions)


def _report_memory(
    metrics: Metrics, model: ServedModel, slots: list[Slot], kv_cache: KVCache, max_model_len: int
) -> None:
    """Log the sizes that were chosen, and set the gauges of device memory."""
    attention = model.attention
    slot_bytes = len(slots[0].memory)
    # One page more is padding.
    kv_bytes = (kv_cache.num_pages + 1) * attention.page_tokens * attention.bytes_per_token
    log.info(
        "%d slots of %.2f GB; a KV cache of %.2f GB for %d tokens; a request may have %d of the model's %d positions",
        len(slots),
        slot_bytes / 1e9,
        kv_bytes / 1e9,
        kv_cache.max_tokens,
        max_model_len,
        model.max_positions,
    )
    metrics.slots.set(len(slots))
    # Tied weights share their storage and count once.
    weights = {tensor.data_ptr(): tensor.nbytes for tensor in model.model.state_dict().values()}
    used = {"slots": len(slots) * slot_bytes, "kv": kv_bytes, "base": sum(weights.values())}
    for kind, num_bytes in used.items():
        metrics.device_memory_bytes.labels(kind=kind).set(num_bytes)


def _fetcher(
    settings: Settings,
    registry: Registry,
    residency_metrics: ResidencyMetrics,
    slots: list[Slot],
    cache_bytes: int,
) -> Fetcher:
    """Connect the slots to the registry: loader threads, and the host cache between them."""
    device, slot_bytes = slots[0].memory.device, len(slots[0].memory)
    # Copies to CUDA need pinned host memory; on the CPU a delta is read straight into its slot.
    cache = HostCache(
        cache_bytes, slot_bytes, NUM_LOADS, device, residency_metrics, is_staged=device.type == "cuda"
    )
    return Fetcher(Loader(device, settings.load_threads), cache, registry)


def _max_batch_tokens(settings: Settings, device: torch.device) -> int:
    """Return the setting, or the device's default, at least twice `max_num_seqs`."""
    return settings.max_batch_tokens or max(BATCH_TOKENS[device.type], 2 * settings.max_num_seqs)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise NotServable("--device cuda: torch finds no CUDA device here: use --device cpu")
    return torch.device(name)
