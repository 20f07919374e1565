"""Puts an engine together: base, arena, loader, residency, tokenizers. The one place that knows all of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from deltastore.loader import Loader
from deltastore.plan import one_bit_plan
from deltastore.registry import Registry
from server.deltas.residency import Residency
from server.deltas.resident import arena
from server.engine.engine import Engine, Limits
from server.engine.runner import Runner
from server.engine.telemetry import Telemetry
from server.engine.templates import TemplateWorker
from server.engine.tokenizer import Tokenizers
from server.errors import NotServable
from server.metrics import Metrics
from server.model.loader import ServedModel, load_model

SLOT_ALIGNMENT = 4096
DTYPES = {"auto": None, "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class BuildConfig:
    """What an engine is made from; see the settings of the same names."""

    base_dir: Path
    device: str  # auto, cpu or cuda
    dtype: str  # auto, bfloat16, float16 or float32
    num_slots: int
    slot_headroom: float  # slot size over the one-bit plan's bytes
    max_queue: int
    load_timeout_s: float
    max_model_len: int | None
    num_load_threads: int


def build_engine(config: BuildConfig, registry: Registry, metrics: Metrics) -> tuple[Engine, Tokenizers]:
    """Load the base and start the engine; slow.

    Raises:
        CheckpointError: the base cannot be read.
        NotServable: its architecture or the device is not one that can be served.
    """
    device = _device(config.device)
    served = load_model(config.base_dir, device, DTYPES[config.dtype])
    plan = one_bit_plan(served.base.shapes)
    slot_bytes = -(-int(plan.device_bytes * config.slot_headroom) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
    slots = arena(config.num_slots, slot_bytes, device)
    loader = Loader(device, slot_bytes, config.num_load_threads)
    telemetry = Telemetry(metrics)
    metrics.slots.set(config.num_slots)
    metrics.device_memory_bytes.labels(kind="slots").set(config.num_slots * slot_bytes)
    metrics.device_memory_bytes.labels(kind="base").set(_num_bytes(served))
    residency = Residency(slots, loader, registry, telemetry)
    tokenizers = Tokenizers(config.base_dir, served.base, registry, TemplateWorker())
    max_len = min(config.max_model_len or served.max_positions, served.max_positions)
    limits = Limits(config.max_queue, config.load_timeout_s, max_len)
    return Engine(Runner(served), residency, served.base, telemetry, limits), tokenizers


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
