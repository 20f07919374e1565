"""Puts an engine together: base, arena, loader, residency, tokenizers. The one place that knows all of them."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from deltastore.base.checkpoint import Checkpoint
from deltastore.format.plan import one_bit_plan
from deltastore.loader import Loader
from deltastore.registry import Registry
from server.deltas.fetcher import Fetcher
from server.deltas.host_cache import HostCache
from server.deltas.residency import Residency
from server.deltas.residency_metrics import ResidencyMetrics
from server.deltas.resident import arena
from server.engine.core import Core
from server.engine.engine import Engine, Limits
from server.engine.memory import Wanted, check_base, free_memory, host_cache_bytes, share_out
from server.engine.model_runner import ModelRunner
from server.engine.scheduling.kv_cache import KVCache
from server.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from server.engine.sequence import Sequence
from server.engine.telemetry import Telemetry
from server.errors import NotServable
from server.metrics import Metrics
from server.model.loader import ServedModel, load_model
from server.model.weights import own_dtype
from server.text.templates import TemplateWorker
from server.text.tokenizer import Tokenizers

log = logging.getLogger(__name__)

SLOT_ALIGNMENT = 4096
NUM_LOADS = 2  # at once from disk: while one waits for its file or its copy, the other keeps the disk busy
BATCH_TOKENS = {"cpu": 128, "cuda": 2048}  # of a step; a prompt's share of it delays the others' next token
DTYPES = {"auto": None, "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class BuildConfig:
    """What an engine is made from; see the settings of the same names."""

    base_dir: Path
    device: str  # auto, cpu or cuda
    dtype: str  # auto, bfloat16, float16 or float32
    num_slots: int | None  # None: as many as fit
    slot_headroom: float  # slot size over the one-bit plan's bytes
    host_cache_bytes: int | None  # None: a part of what is free
    kv_cache_bytes: int | None  # None: what fits, at most what can be used
    max_num_seqs: int
    max_batch_tokens: int | None  # None: as the device
    max_queue: int
    load_timeout_s: float
    max_model_len: int | None
    num_load_threads: int


def build_engine(
    config: BuildConfig, registry: Registry, metrics: Metrics, stopping: threading.Event | None = None
) -> tuple[Engine, Tokenizers]:
    """Load the base and start the engine; takes as long as reading the base, and seconds more.

    Args:
        config: what to load and how much memory to take.
        registry: where deltas come from.
        metrics: what the engine counts in.
        stopping: when set, loading ends soon.

    Raises:
        CheckpointError: the base cannot be read.
        NotServable: its architecture or the device is not one that can be served, or memory is too small.
        Draining: `stopping` was set.
    """
    device, checkpoint = _device(config.device), Checkpoint.open(config.base_dir)
    dtype = DTYPES[config.dtype] or own_dtype(checkpoint)
    shapes = checkpoint.shapes()
    slot_bytes = _slot_bytes(shapes, config.slot_headroom)
    base_bytes = dtype.itemsize * sum(map(math.prod, shapes.values()))
    check_base(
        base_bytes,
        dtype,
        device,
        slot_bytes,
        Wanted(config.kv_cache_bytes, config.num_slots, 0),
        config.host_cache_bytes,
    )
    served = load_model(checkpoint, device, dtype, stopping or threading.Event())
    if device.type == "cuda":
        # What the probe has used would count as taken.
        torch.cuda.empty_cache()
    max_len = min(config.max_model_len or served.max_positions, served.max_positions)
    cache_bytes = host_cache_bytes(config.host_cache_bytes)
    wanted = Wanted(config.kv_cache_bytes, config.num_slots, config.max_num_seqs * max_len)
    attention = served.attention
    page_bytes = attention.page_tokens * attention.bytes_per_token
    shares = share_out(
        free_memory(device, cache_bytes), page_bytes, attention.page_tokens, slot_bytes, wanted
    )
    attention.allocate(shares.num_pages)
    slots = arena(shares.num_slots, slot_bytes, device)
    kv_cache = KVCache(shares.num_pages, attention.page_tokens)
    log.info(
        "%d slots of %.2f GB; a KV cache of %.2f GB for %d tokens; a request may have %d of the model's %d positions",
        shares.num_slots,
        slot_bytes / 1e9,
        shares.num_pages * page_bytes / 1e9,
        kv_cache.max_tokens,
        min(max_len, kv_cache.max_tokens),
        served.max_positions,
    )
    telemetry, residency_metrics = Telemetry(metrics), ResidencyMetrics(metrics)
    cache = HostCache(
        cache_bytes, slot_bytes, NUM_LOADS, device, residency_metrics, is_staged=device.type == "cuda"
    )
    fetcher = Fetcher(Loader(device, config.num_load_threads), cache, registry)
    metrics.slots.set(shares.num_slots)
    metrics.host_cache_limit_bytes.set(cache_bytes)
    used = {
        "slots": shares.num_slots * slot_bytes,
        "kv": shares.num_pages * page_bytes,
        "base": _num_bytes(served),
    }
    for kind, size in used.items():
        metrics.device_memory_bytes.labels(kind=kind).set(size)
    residency = Residency(slots, fetcher, residency_metrics)
    scheduler = Scheduler[Sequence](
        SchedulerLimits(
            config.max_num_seqs,
            config.max_batch_tokens or max(BATCH_TOKENS[device.type], 2 * config.max_num_seqs),
        ),
        pages=kv_cache,
        slots=residency,
    )
    core = Core(ModelRunner(served), residency, scheduler, kv_cache, telemetry)
    limits = Limits(
        config.max_num_seqs + config.max_queue, config.load_timeout_s, min(max_len, kv_cache.max_tokens)
    )
    tokenizers = Tokenizers(config.base_dir, served.base, registry, TemplateWorker())
    return Engine(core, residency, served.base, telemetry, limits), tokenizers


def _slot_bytes(shapes: Mapping[str, tuple[int, ...]], headroom: float) -> int:
    """Bytes of a slot: what one bit per weight of a base takes, times `headroom`, in whole pages."""
    plan = one_bit_plan(shapes)
    return -(-int(plan.device_bytes * headroom) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def _num_bytes(served: ServedModel) -> int:
    return sum(
        tensor.nbytes for tensor in {t.data_ptr(): t for t in served.model.state_dict().values()}.values()
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise NotServable("--device cuda: torch finds no CUDA device here; use --device cpu")
    return torch.device(name)
