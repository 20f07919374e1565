"""The parts that all sections of the GPU bench share: rows of its table, times on a device, and a model to run.

The model is a Llama with random weights and random deltas, made on the device without files. A delta has the layout of
the artifact format and no manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from bench.harness import seconds
from deltastore.base import Base
from deltastore.format.header import DTYPE_BYTES, Header, TensorEntry
from deltastore.format.layout import TENSOR_ALIGNMENT
from deltastore.format.manifest import Manifest, TensorSpec, padding_tensor
from deltastore.format.matrix import packed_width
from deltastore.format.sizes import is_matrix
from server.deltas.resident import DeltaLayout, DeltaTables, Part, ResidentDelta, Slot, view

HOST_TO_READY_MS = 25.0
FASTER_THAN_CHECKPOINT = 10.0
STEP_SLACK = 1.25  # of base + k deltas of a sixteenth
BASE_TRAFFIC = 0.98
RESIDENT = 45


@dataclass(frozen=True, slots=True)
class BenchSizes:
    """Sizes of the model and of each measurement."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    tokens: tuple[int, ...]  # of decode steps
    variants: tuple[int, ...]  # in one step, 0 is the base alone
    context: int  # tokens that each sequence has in the cache before a step
    prompts: tuple[int, ...]
    repeats: int

    def compositions(self) -> Iterator[tuple[int, int]]:
        """Tokens and variants of each decode step; a variant has at least one token."""
        return ((tokens, k) for tokens in self.tokens for k in self.variants if k <= tokens)


FULL = BenchSizes(32, 4096, 14336, 32, 8, 128256, (16, 64), (0, 1, 2, 4, 8, 16, 32), 512, (512, 4096), 20)
SMALL = BenchSizes(2, 96, 160, 6, 2, 200, (4, 6), (0, 1, 2, 4), 20, (8, 37), 2)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    section: str
    name: str
    unit: str
    goal: str = ""
    value: float | None = None
    met: bool | None = None
    note: str = ""


class Rows:
    """All planned rows, in order."""

    def __init__(self, sizes: BenchSizes) -> None:
        self._rows = {(row.section, row.name): row for row in _planned(sizes)}

    def put(self, section: str, name: str, value: float, met: bool | None = None, note: str = "") -> None:
        """Fill a planned row."""
        row = self._rows[section, name]
        if (met is None) != (not row.goal):
            raise ValueError(f"{section}, {name}: a row with a goal needs `met`, and no other row takes it")
        self._rows[section, name] = replace(row, value=value, met=met, note=note)

    def explain(self, section: str, reason: str) -> None:
        """Note a reason in the rows of a section that are not measured."""
        for key, row in self._rows.items():
            if row.section == section and row.value is None:
                self._rows[key] = replace(row, note=reason)

    @property
    def is_wrong(self) -> bool:
        """True if a kernel's error exceeded the tolerance."""
        return any(row.section == "kernels" and row.met is False for row in self._rows.values())

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows.values())

    def as_json(self) -> list[dict[str, Any]]:
        """The measured rows."""
        return [asdict(row) for row in self if row.value is not None]


def _planned(sizes: BenchSizes) -> Iterator[Row]:
    for name in (
        "sign product",
        "sign product, bf16",
        "embedding rows",
        "paged attention",
        "paged attention, bf16",
    ):
        yield Row("kernels", name, "of the tolerance", "at most 1")
    yield Row("load", "limit: one pinned copy of a delta's bytes", "ms")
    yield Row("load", "delta, host to slot: copy", "ms")
    yield Row("load", "delta, host to ready: copy and tables", "ms", f"at most {HOST_TO_READY_MS:.0f} ms")
    for cache in ("warm", "dropped"):
        for stage in ("read and verify", "rest of the copy", "total with views"):
            yield Row("load", f"delta, disk, page cache {cache}: {stage}", "ms")
        yield Row("load", f"full checkpoint, stock safetensors, page cache {cache}", "ms")
    yield Row(
        "load",
        "host to ready, times faster than the checkpoint (warm)",
        "",
        f"at least {FASTER_THAN_CHECKPOINT:.0f}",
    )
    yield Row("load", "disk to ready, times faster than the checkpoint (dropped)", "")
    for tokens in sizes.tokens:
        yield Row("base traffic", f"{tokens} tokens: plain transformers", "ms")
        yield Row("base traffic", f"{tokens} tokens: paged, no deltas possible", "ms")
        yield Row("base traffic", f"{tokens} tokens: delta-enabled, without a graph", "ms")
        for against in ("plain transformers", "paged, no deltas possible"):
            yield Row(
                "base traffic", f"{tokens} tokens: of the speed of {against}", "", f"at least {BASE_TRAFFIC}"
            )
    for tokens, k in sizes.compositions():
        goal = f"at most {step_limit(k):.2f} of base alone" if k else ""
        yield Row("decode", f"{tokens} tokens, {k or 'no'} variants", "ms", goal)
    for tokens in sizes.prompts:
        for who in ("plain transformers", "base", "one variant"):
            yield Row("prefill", f"{tokens} tokens: {who}", "ms")
    yield Row("fit", "slot", "MB")
    yield Row("fit", "variants resident beside base and cache", "", f"at least {RESIDENT}")


def step_limit(num_variants: int) -> float:
    """Return the limit of a step with so many deltas, in units of the base's step."""
    return STEP_SLACK * (1 + num_variants / 16)


WARM_UPS = 3


def median_s(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median of `repeats` runs after warm-ups, between CUDA events or by a CPU's clock."""
    for _ in range(WARM_UPS if device.type == "cuda" else 1):
        run()
    return median(
        (_between_events if device.type == "cuda" else seconds)(run, device) for _ in range(repeats)
    )


def captured(run: Callable[[], object], device: torch.device) -> tuple[Callable[[], object], str]:
    """Capture `run` as a CUDA graph after warm-ups; return what replays it and a note, or `run` and the reason."""
    if device.type != "cuda":
        return run, "no graphs on a CPU"
    for _ in range(WARM_UPS):
        run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError as error:
        torch.cuda.synchronize(device)
        return run, f"without a graph, capture failed: {str(error).splitlines()[0]}"
    return graph.replay, "CUDA graph"


def _between_events(run: Callable[[], object], device: torch.device) -> float:
    torch.cuda.synchronize(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


HEAD = "lm_head.weight"
FINGERPRINT = "0" * 64
GAIN = 2.0**-12  # small beside weights of 0.02, so that activations stay what a model's are


@dataclass(frozen=True, slots=True, eq=False)
class Blueprint:
    """Layout of the deltas of one base: two scales per matrix, norms whole."""

    header: Header
    manifest: Manifest
    entries: tuple[TensorEntry, ...]  # in the order of their bytes, padding included

    @property
    def device_bytes(self) -> int:
        return self.entries[-1].end

    def layout(self, tables: DeltaTables) -> DeltaLayout:
        return tables.layout(self.header, self.manifest, FINGERPRINT)


def build_model(sizes: BenchSizes, device: torch.device) -> PreTrainedModel:
    """Make a bf16 Llama with Llama 3.1's rotary embedding and transformers' initial weights."""
    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    nn.Module.train(model, False).requires_grad_(False)
    return model


def base_of(model: PreTrainedModel) -> Base:
    """Describe a model as the server describes a loaded base; the fingerprint is a placeholder."""
    return Base(
        id="random-llama",
        fingerprint=FINGERPRINT,
        shapes={name: tuple(value.shape) for name, value in model.named_parameters()},
        config={},
        embedding="model.embed_tokens.weight",
        head=HEAD,
    )


def blueprint(shapes: Mapping[str, tuple[int, ...]]) -> Blueprint:
    """Lay out a delta of every tensor, in the order of `shapes`."""
    entries: list[TensorEntry] = []
    specs: dict[str, TensorSpec] = {}
    for name, shape in shapes.items():
        if is_matrix(name, shape):
            out_features, in_features = shape
            specs[name] = TensorSpec(codec="onebit", shape=list(shape), axis="both")
            _append(entries, f"{name}.signs", "U8", (out_features, packed_width(in_features)))
            _append(entries, f"{name}.scale_out", "F16", (out_features,))
            _append(entries, f"{name}.scale_in", "F16", (in_features,))
            _append(entries, f"{name}.gain", "F32", (1,))
        else:
            specs[name] = TensorSpec(codec="whole", shape=list(shape))
            _append(entries, name, "BF16", shape)
    manifest = Manifest(
        base_id="random-llama",
        base_fingerprint=FINGERPRINT,
        method="both",
        tied=False,
        device_bytes=entries[-1].end,
        config={},
        tensors=specs,
        files=[],
        compressor={},
        fidelity={},
    )
    header = Header({entry.name: entry for entry in entries}, {}, 0)
    return Blueprint(header, manifest, tuple(entries))


def fill(memory: Tensor, drawing: Blueprint, seed: int) -> None:
    """Fill a slot's bytes with random signs, scales of one and the base's norms."""
    generator = torch.Generator(memory.device).manual_seed(seed)
    memory[: drawing.device_bytes].random_(0, 256, generator=generator)
    for entry in drawing.entries:
        if entry.dtype != "U8":
            view(entry, memory).fill_(GAIN if entry.name.endswith(".gain") else 1)


def tables_of(shapes: Mapping[str, tuple[int, ...]], num_slots: int, device: torch.device) -> DeltaTables:
    """Make the tables of a model with these tensors."""
    tables = DeltaTables()
    for name, shape in shapes.items():
        if is_matrix(name, shape):
            tables.add_part(Part(name, shape[0]))
        else:
            tables.add_vector(name, torch.ones(shape, dtype=torch.bfloat16, device=device))
    tables.allocate(num_slots, device)
    return tables


def make_resident(tables: DeltaTables, slots: list[Slot], drawing: Blueprint) -> list[ResidentDelta]:
    """Fill each slot with a delta of its own."""
    for slot in slots:
        fill(slot.memory, drawing, slot.index)
    layout = drawing.layout(tables)
    return [tables.adopt(layout, slot) for slot in slots]


def _append(entries: list[TensorEntry], name: str, dtype: str, shape: tuple[int, ...]) -> None:
    start = entries[-1].end if entries else 0
    num_bytes = DTYPE_BYTES[dtype] * torch.Size(shape).numel()
    entry = TensorEntry(name, dtype, shape, start, start + num_bytes)
    entries.append(entry)
    if padding := -entry.end % TENSOR_ALIGNMENT:
        filler = padding_tensor(len(entries))
        entries.append(TensorEntry(filler, "U8", (padding,), entry.end, entry.end + padding))
