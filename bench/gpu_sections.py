"""Sections of the GPU bench: correctness of kernels, loads by stage, and steps over many variants.

Kernels are compared with the reference at odd shapes, with NaN wherever no kernel may read. The load of a delta into
its slot is timed beside one plain copy and the load of the full checkpoint. Steps and prompts are timed plain, paged
and delta-enabled; and slots are counted.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from bench.gpu_model import (
    BASE_TRAFFIC,
    FASTER_THAN_CHECKPOINT,
    HOST_TO_READY_MS,
    RESIDENT,
    BenchSizes,
    Blueprint,
    Rows,
    base_of,
    captured,
    fill,
    make_resident,
    median_s,
    step_limit,
    tables_of,
)
from bench.harness import seconds, settle
from deltastore.format.header import encode_header
from deltastore.format.matrix import packed_width
from deltastore.loader import Loader, LoadReport
from deltastore.registry.uploads import CHUNK_BYTES, ChunkedDigest
from deltastore.verified_object import ObjectSource
from peraxis.demo.page_cache import drop
from server import kernels
from server.deltas.layers import attach
from server.deltas.resident import BatchContext, DeltaLayout, DeltaTables, ResidentDelta, Slot, arena
from server.engine.build import CUDA_SHARE, DEFAULT_MAX_SLOTS
from server.kernels import attention_cuda, reference
from server.kernels.reference import FIELDS, AttentionGroup, AttentionParams, row_of
from server.model.attention import AttentionMetadata, Chunk, PagedAttention

SHAPES = ((1, 1), (7, 5), (33, 100), (130, 129), (96, 4096), (257, 1023))  # out, in
# Ranges of rows; rows between them belong to no group.
GROUPS = (((0, 1), (1, 3)), ((2, 2), (2, 19)), ((1, 40), (41, 42), (42, 170)))
HEADS = ((32, 8, 128), (5, 1, 80), (3, 3, 100), (16, 8, 256))  # heads, kv heads, dim
LENGTHS = (1, 37, 700, 5000)
PAGE = 16
RULES = (
    AttentionParams(None, None, None, None),
    AttentionParams(0.1, 300, None, None),
    AttentionParams(None, None, 30.0, None),
    AttentionParams(0.2, 33, 2.0, torch.tensor(1.5)),
)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}  # of what is summed


@dataclass(frozen=True, slots=True, eq=False)
class Deltas:
    """One delta per slot: the first has a plane, the second none of `scale_in`, the third adds nothing."""

    table: Tensor
    parts: list[Tensor]  # keeps alive what the table points to


def check(rows: Rows, device: torch.device, lengths: tuple[int, ...] = LENGTHS) -> None:
    """Fill the section `kernels` with the greatest errors, in units of the tolerance."""
    for name, dtype in (("sign product", torch.float32), ("sign product, bf16", torch.bfloat16)):
        put(rows, name, max(_product_error(*case, dtype, device) for case in _cases()))
    put(rows, "embedding rows", max(_rows_error(*case, device) for case in _cases()))
    if device.type != "cuda":
        rows.explain("kernels", "on CUDA alone; the tests run it interpreted")
        return
    for name, dtype in (("paged attention", torch.float32), ("paged attention, bf16", torch.bfloat16)):
        # In several parts, and in one.
        both = (lengths, lengths[:2])
        put(rows, name, max(error for some in both for error in attention_errors(dtype, device, some)))


def put(rows: Rows, name: str, error: float) -> None:
    rows.put("kernels", name, error, met=error <= 1)


def _cases() -> Iterator[tuple[tuple[int, int], tuple[tuple[int, int], ...]]]:
    return ((shape, ranges) for shape in SHAPES for ranges in GROUPS)


def _product_error(
    shape: tuple[int, int], ranges: tuple[tuple[int, int], ...], dtype: torch.dtype, device: torch.device
) -> float:
    deltas, generator = _deltas(shape, len(ranges), device), torch.Generator(device).manual_seed(1)
    num_rows, bounds = ranges[-1][1] + 2, torch.tensor(ranges, dtype=torch.int32, device=device)
    x = torch.randn(num_rows, shape[1], generator=generator, device=device).to(dtype)
    base = torch.randn(num_rows, shape[0], generator=generator, device=device).to(dtype)
    _poison_others(base, ranges)
    output, want = base.clone(), base.clone()
    order = torch.arange(num_rows, dtype=torch.int32, device=device)
    kernels.add_planes(output, x, deltas.table, order, bounds, [shape[0]])
    reference.add_planes(want, x, deltas.table, order, bounds, [shape[0]])
    return _error(output, want, TOLERANCE[dtype], scale=shape[1] ** 0.5)


def _rows_error(shape: tuple[int, int], ranges: tuple[tuple[int, int], ...], device: torch.device) -> float:
    deltas, generator = _deltas(shape, len(ranges), device), torch.Generator(device).manual_seed(1)
    num_rows, bounds = ranges[-1][1] + 2, torch.tensor(ranges, dtype=torch.int32, device=device)
    ids = torch.randint(0, shape[0], (num_rows,), generator=generator, device=device)
    base = torch.randn(num_rows, shape[1], generator=generator, device=device)
    _poison_others(base, ranges)
    output, want = base.clone(), base.clone()
    order = torch.arange(num_rows, dtype=torch.int32, device=device)
    kernels.add_rows(output, ids, deltas.table, order, bounds, shape[0], 2.0)
    reference.add_rows(want, ids, deltas.table, order, bounds, shape[0], 2.0)
    return _error(output, want, TOLERANCE[torch.float32])


def _deltas(shape: tuple[int, int], count: int, device: torch.device) -> Deltas:
    generator, width = torch.Generator(device).manual_seed(0), packed_width(shape[1])
    parts: list[Tensor] = []
    table = torch.zeros(1, count, FIELDS, dtype=torch.int64)
    for number in range(min(count, 2)):
        signs = torch.randint(0, 256, (shape[0], width), generator=generator, device=device).to(torch.uint8)
        if spare := -shape[1] % 8:
            signs[:, -1] &= 0xFF >> spare  # pad bits are 0
        scale_out, scale_in = (torch.randn(size, generator=generator, device=device).half() for size in shape)
        gain = torch.full((1,), 0.5, device=device)
        parts += [signs, scale_out, scale_in, gain]
        table[0, number] = row_of([(signs, scale_out, None if number else scale_in, gain)])
    return Deltas(table.to(device), parts)


def _poison_others(output: Tensor, ranges: tuple[tuple[int, int], ...]) -> None:
    owned = torch.zeros(len(output), dtype=torch.bool)
    for first, last in ranges:
        owned[first:last] = True
    output[~owned.to(output.device)] = torch.nan


def _error(output: Tensor, want: Tensor, tolerance: float, scale: float = 1.0) -> float:
    """Return the greatest difference over the tolerance for sums of size `scale`; infinite where NaN differs."""
    output, want = output.double(), want.double()
    if not torch.equal(output.isnan(), want.isnan()):
        return float("inf")
    return float(((output - want).abs() / (tolerance * (scale + want.abs()))).nan_to_num(0).max())


def attention_errors(dtype: torch.dtype, device: torch.device, lengths: tuple[int, ...]) -> Iterator[float]:
    """Yield the errors of the Triton kernels over all heads and rules, for sequences of `lengths` keys."""
    for heads, shared, dim in HEADS:
        generator = torch.Generator(device).manual_seed(2)
        keys, values, span = _cache(shared, dim, lengths, device)
        query = torch.randn(len(lengths), heads, dim, generator=generator, device=device).to(dtype)
        cached = keys.to(dtype), values.to(dtype)
        for rules in RULES:
            sinks = None if rules.sinks is None else rules.sinks.to(device).expand(heads)
            own = AttentionParams(rules.scaling, rules.window, rules.softcap, sinks)
            output = torch.full_like(query, torch.nan)
            attention_cuda.attend(output, query, cached, span, own)
            want = [_attention(query[i], cached, span, own, i) for i in range(len(lengths))]
            yield _error(output, torch.stack(want), TOLERANCE[dtype])


def _cache(
    shared: int, dim: int, lengths: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor, AttentionGroup]:
    """Make keys and values in pages in random order, with NaN outside every sequence."""
    generator = torch.Generator(device).manual_seed(3)
    needs = [-(-length // PAGE) for length in lengths]
    order = torch.randperm(sum(needs) + 1, generator=generator, device=device)
    keys, values = (torch.full((len(order), PAGE, shared, dim), torch.nan, device=device) for _ in range(2))
    table = order[-1].expand(len(lengths), max(needs)).clone()
    for number, (length, own) in enumerate(zip(lengths, torch.split(order[:-1], needs), strict=True)):
        table[number, : len(own)] = own
        at = torch.arange(length, device=device)
        for part in (keys, values):
            part[own[at // PAGE], at % PAGE] = torch.randn(
                length, shared, dim, generator=generator, device=device
            )
    positions = torch.tensor(lengths, device=device)[:, None] - 1
    return keys, values, AttentionGroup(torch.arange(len(lengths), device=device)[:, None], table, positions)


def _attention(
    query: Tensor, cached: tuple[Tensor, Tensor], span: AttentionGroup, rules: AttentionParams, number: int
) -> Tensor:
    """Compute one token's attention in float64, [heads, dim]."""
    last = int(span.positions[number, 0])
    first = 0 if rules.window is None else max(0, last - rules.window + 1)
    at = torch.arange(first, last + 1, device=query.device)
    repeats = len(query) // cached[0].shape[2]
    slots = span.page_table[number, at // PAGE], at % PAGE
    key, value = (part[slots].double().repeat_interleave(repeats, 1) for part in cached)
    scores = torch.einsum("hd,khd->hk", query.double(), key)
    scores *= query.shape[1] ** -0.5 if rules.scaling is None else rules.scaling
    if rules.softcap is not None:
        scores = rules.softcap * (scores / rules.softcap).tanh()
    if rules.sinks is not None:
        scores = torch.cat([scores, rules.sinks.double()[:, None]], 1)
    return torch.einsum("hk,khd->hd", scores.softmax(1)[:, : len(at)], value)


SHARD_BYTES = 1 << 30
# Shards that must fit before one is written; other programs use the disk, too.
MIN_FREE_SHARDS = 5
# Time limit for writing the checkpoint. The load of a part is scaled to the whole, with a note.
WRITING_S = 15.0
NUM_THREADS = 16
SECTION = "load"


@dataclass(frozen=True, slots=True)
class DeltaLoad:
    """One delta to be loaded again and again: its bytes in host memory, and its slot."""

    loader: Loader
    drawing: Blueprint
    host: Tensor
    slot: Slot
    tables: DeltaTables
    layout: DeltaLayout

    def adopt(self) -> ResidentDelta:
        return self.tables.adopt(self.layout, self.slot)


def measure_load(
    rows: Rows, weights: Mapping[str, Tensor], drawing: Blueprint, directory: Path, repeats: int
) -> None:
    """Fill the section `load`.

    Args:
        weights: the base's weights by name, on the device.
        drawing: layout of a delta for them.
        directory: a folder on a disk with room for some of the weights.
        repeats: number of runs of all but the checkpoint's load.
    """
    device = next(iter(weights.values())).device
    host = torch.empty(drawing.device_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    slot = Slot(0, torch.empty(drawing.device_bytes, dtype=torch.uint8, device=device))
    fill(slot.memory, drawing, seed=0)
    host.copy_(slot.memory)
    limit = median_s(lambda: slot.memory.copy_(host, non_blocking=True), device, repeats)
    speed = _speed(drawing.device_bytes, limit)
    rows.put(SECTION, "limit: one pinned copy of a delta's bytes", 1e3 * limit, note=speed)
    source = write_delta(directory / "delta.safetensors", drawing, host)
    loader = Loader(device, NUM_THREADS)
    try:
        tables = tables_of({name: tuple(value.shape) for name, value in weights.items()}, 1, device)
        delta = DeltaLoad(loader, drawing, host, slot, tables, drawing.layout(tables))
        ready = _from_host(rows, delta, repeats)
        disk = {cache: _from_disk(rows, delta, source, cache) for cache in ("warm", "dropped")}
    finally:
        loader.close()
    full = _checkpoint(rows, weights, directory)
    if "warm" in full:
        times = full["warm"] / ready
        name = "host to ready, times faster than the checkpoint (warm)"
        rows.put(SECTION, name, times, met=times >= FASTER_THAN_CHECKPOINT)
    if "dropped" in full:
        name = "disk to ready, times faster than the checkpoint (dropped)"
        rows.put(SECTION, name, full["dropped"] / disk["dropped"])


def _from_host(rows: Rows, delta: DeltaLoad, repeats: int) -> float:
    copies, views = [], []
    # The first run warms up.
    for _ in range(repeats + 1):
        copies.append(delta.loader.copy(delta.host, delta.slot.memory).total_s)
        views.append(seconds(delta.adopt, delta.slot.memory.device))
    copy, ready = median(copies[1:]), median(map(sum, zip(copies[1:], views[1:], strict=True)))
    rows.put(SECTION, "delta, host to slot: copy", 1e3 * copy, note=_speed(delta.drawing.device_bytes, copy))
    rows.put(
        SECTION, "delta, host to ready: copy and tables", 1e3 * ready, met=1e3 * ready <= HOST_TO_READY_MS
    )
    return ready


def _from_disk(rows: Rows, delta: DeltaLoad, source: ObjectSource, cache: str) -> float:
    reports: list[LoadReport] = []
    totals: list[float] = []
    notes = set()
    for _ in range(3):
        if cache == "dropped":
            notes.add("" if drop([source.path]) else "not dropped: the kernel refused")
        start = time.perf_counter()
        reports.append(delta.loader.load(source, delta.host, delta.slot.memory))
        delta.adopt()
        settle(delta.slot.memory.device)
        totals.append(time.perf_counter() - start)
    note = "; ".join(notes - {""})
    stages = {
        "read and verify": median(report.read_s for report in reports),
        "rest of the copy": median(report.copy_s for report in reports),
        "total with views": median(totals),
    }
    for stage, value in stages.items():
        rows.put(SECTION, f"delta, disk, page cache {cache}: {stage}", 1e3 * value, note=note)
    return stages["total with views"]


def write_delta(path: Path, drawing: Blueprint, host: Tensor) -> ObjectSource:
    """Write the delta's bytes behind a header that safetensors reads, without a manifest."""
    header, digest = encode_header(drawing.entries, {}), ChunkedDigest()
    with path.open("wb") as file:
        for data in (memoryview(header), host.numpy().data):
            for start in range(0, len(data), CHUNK_BYTES):
                digest.update(data[start : start + CHUNK_BYTES])
                file.write(data[start : start + CHUNK_BYTES])
    return ObjectSource(
        path, digest.digest(), digest.num_bytes, len(header), len(host), digest.chunk_digests()
    )


def _checkpoint(rows: Rows, weights: Mapping[str, Tensor], directory: Path) -> dict[str, float]:
    """Time the load of the whole checkpoint; seconds by state of the page cache."""
    device = next(iter(weights.values())).device
    paths, written = _write_checkpoint(weights, directory)
    total = sum(tensor.nbytes for tensor in weights.values())
    if not written:
        rows.explain(SECTION, "the disk had no room for a checkpoint")
        return {}
    found = {}
    for cache in ("warm", "dropped"):
        note = "" if written == total else f"SCALED from {written / 1e9:.1f} of {total / 1e9:.1f} GB"
        if cache == "dropped" and not drop(paths):
            note += " not dropped: the kernel refused"
        else:
            for path in paths if cache == "warm" else ():
                _touch(path)
        found[cache] = seconds(lambda: _load_all(paths, device), device) * total / written
        if device.type == "cuda":
            torch.cuda.empty_cache()
        rows.put(
            SECTION,
            f"full checkpoint, stock safetensors, page cache {cache}",
            1e3 * found[cache],
            note=f"{_speed(total, found[cache])} {note}".strip(),
        )
    return found


def _load_all(paths: Sequence[Path], device: torch.device) -> None:
    """Load all tensors into memory of their own; on a CPU safetensors only maps them."""
    held = []
    for path in paths:
        tensors = load_file(path, device=str(device))
        held.append(tensors if device.type == "cuda" else {name: tensors[name].clone() for name in tensors})


def _touch(path: Path) -> None:
    with path.open("rb") as file:
        while file.read(CHUNK_BYTES):
            pass


def _write_checkpoint(weights: Mapping[str, Tensor], directory: Path) -> tuple[list[Path], int]:
    """Write as many shards of the weights as disk and time allow; return them and their bytes."""
    paths: list[Path] = []
    written, start = 0, time.perf_counter()
    for number, shard in enumerate(_shards(weights)):
        num_bytes = sum(tensor.nbytes for tensor in shard.values())
        has_room = shutil.disk_usage(directory).free > MIN_FREE_SHARDS * num_bytes
        if not has_room or time.perf_counter() - start > WRITING_S:
            break
        paths.append(directory / f"model-{number:05}.safetensors")
        save_file(shard, paths[-1], metadata={"format": "pt"})
        with paths[-1].open("rb") as file:
            # Counts as part of writing, and lets its pages be dropped.
            os.fsync(file.fileno())
        written += num_bytes
    return paths, written


def _shards(weights: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        shard[name] = tensor
        if sum(own.nbytes for own in shard.values()) >= SHARD_BYTES:
            yield shard
            shard = {}
    if shard:
        yield shard


def _speed(num_bytes: int, spent_s: float) -> str:
    return f"{num_bytes / 1e9 / spent_s:.1f} GB/s"


PAGE_TOKENS = 16  # as the server's
SLOT_SLACK = 1.15  # of the one-bit plan, as the server's
CPU_MEMORY = 64 << 20  # stands in for a device's where there is none


@dataclass(slots=True)
class StepBench:
    """One model, which becomes paged and then delta-enabled."""

    model: PreTrainedModel
    sizes: BenchSizes
    device: torch.device
    rows: Rows
    attention: PagedAttention | None = None
    context: BatchContext | None = None
    deltas: list[ResidentDelta] = field(default_factory=list)

    @property
    def pages_each(self) -> int:
        """Number of pages of one sequence in a decode step."""
        return self.sizes.context // PAGE_TOKENS + 1

    @torch.inference_mode()
    def plain(self) -> dict[int, float]:
        """Time transformers' own steps and prompts; return seconds of a step by its tokens."""
        found = {}
        for tokens in self.sizes.tokens:
            ids = self._ids(tokens, self.sizes.context)
            cache = DynamicCache(config=self.model.config)
            self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

            def step(ids: Tensor = ids[:, -1:], cache: DynamicCache = cache) -> None:
                self.model(input_ids=ids, past_key_values=cache, use_cache=True)
                # Removes the new token.
                cache.crop(-1)

            found[tokens] = median_s(step, self.device, self.sizes.repeats)
            name = f"{tokens} tokens: plain transformers"
            self.rows.put("base traffic", name, 1e3 * found[tokens], note="DynamicCache, no graph")
        for tokens in self.sizes.prompts:
            ids = self._ids(1, tokens)

            def prompt(ids: Tensor = ids) -> None:
                self.model(input_ids=ids, use_cache=False, logits_to_keep=1)

            self._put_prompt(tokens, "plain transformers", prompt)
        return found

    @torch.inference_mode()
    def page(self) -> dict[int, float]:
        """Make the model attend to a paged cache; return seconds of a step by its tokens, without hooks."""
        self.attention = PagedAttention(self.model, PAGE_TOKENS)
        self.model(input_ids=self._ids(1, 3), use_cache=False)
        decode_pages = max(self.sizes.tokens) * self.pages_each
        prompt_pages = max(self.sizes.prompts) // PAGE_TOKENS + 1
        self.attention.allocate(max(decode_pages, prompt_pages) + 1)
        found = {}
        for tokens in self.sizes.tokens:
            with self._decoding(tokens, 0) as step:
                run, note = captured(step, self.device)
                found[tokens] = median_s(run, self.device, self.sizes.repeats)
            name = f"{tokens} tokens: paged, no deltas possible"
            self.rows.put("base traffic", name, 1e3 * found[tokens], note=note)
        return found

    def fit(self, drawing: Blueprint) -> None:
        """Hook all layers, allocate every slot that fits, and fill the first ones with deltas."""
        self.context = attach(self.model, base_of(self.model))
        slot_bytes = int(SLOT_SLACK * drawing.device_bytes)
        slot_bytes += -slot_bytes % 256
        num_slots = min(DEFAULT_MAX_SLOTS, self._free_bytes() // slot_bytes)
        slots = arena(num_slots, slot_bytes, self.device)
        assert self.attention is not None
        cache = self.attention.bytes_per_token * PAGE_TOKENS * max(self.sizes.tokens) * self.pages_each
        self.rows.put("fit", "slot", slot_bytes / 1e6, note=f"{drawing.device_bytes / 1e6:.1f} MB of it used")
        self.rows.put(
            "fit",
            "variants resident beside base and cache",
            num_slots,
            met=num_slots >= RESIDENT,
            note=f"cache {cache / 1e9:.2f} GB; at most {DEFAULT_MAX_SLOTS} are taken",
        )
        max_rows = max(*self.sizes.tokens, *self.sizes.prompts)
        self.context.allocate(num_slots, max_rows, self.device)
        self.deltas = make_resident(self.context.tables, slots[: max(self.sizes.variants)], drawing)

    @torch.inference_mode()
    def decode(self) -> dict[int, float]:
        """Time steps with each number of variants; return seconds of the base's step by its tokens."""
        base: dict[int, float] = {}
        for tokens, k in self.sizes.compositions():
            if k > len(self.deltas):
                continue
            with self._decoding(tokens, k) as step:
                if not k:
                    eager = median_s(step, self.device, self.sizes.repeats)
                    name = f"{tokens} tokens: delta-enabled, without a graph"
                    self.rows.put("base traffic", name, 1e3 * eager)
                run, note = captured(step, self.device)
                spent = median_s(run, self.device, self.sizes.repeats)
            base.setdefault(tokens, spent)
            times = spent / base[tokens]
            met = times <= step_limit(k) if k else None
            name = f"{tokens} tokens, {k or 'no'} variants"
            self.rows.put("decode", name, 1e3 * spent, met=met, note=f"{times:.2f} of base; {note}")
        return base

    @torch.inference_mode()
    def prefill(self) -> None:
        """Time one prompt at a time, of the base and of a variant."""
        for tokens in self.sizes.prompts:
            for who, delta in (("base", None), ("one variant", self.deltas[0])):
                pages = list(range(1, 2 + (tokens - 1) // PAGE_TOKENS))
                with self._running([Chunk(0, tokens, pages)], [delta]) as forward:
                    self._put_prompt(tokens, who, forward)

    def compare(self, plain: dict[int, float], paged: dict[int, float], base: dict[int, float]) -> None:
        """Compare the base's speed on a delta-enabled model with that of the model without hooks."""
        for tokens, spent in base.items():
            for against, other in (("plain transformers", plain), ("paged, no deltas possible", paged)):
                speed = other[tokens] / spent
                name = f"{tokens} tokens: of the speed of {against}"
                self.rows.put("base traffic", name, speed, met=speed >= BASE_TRAFFIC)

    def _put_prompt(self, tokens: int, who: str, run: Callable[[], object]) -> None:
        spent = median_s(run, self.device, max(2, self.sizes.repeats // 4))
        note = f"{tokens / spent:.0f} tokens/s"
        self.rows.put("prefill", f"{tokens} tokens: {who}", 1e3 * spent, note=note)

    @contextmanager
    def _decoding(self, tokens: int, num_variants: int) -> Iterator[Callable[[], Tensor]]:
        """Prepare a decode step with one token of each of `tokens` sequences, spread over the variants."""
        each, context = self.pages_each, self.sizes.context
        chunks = [Chunk(context, 1, range(1 + i * each, 1 + (i + 1) * each)) for i in range(tokens)]
        owners = [self.deltas[i * num_variants // tokens] if num_variants else None for i in range(tokens)]
        with self._running(chunks, owners) as forward:
            yield forward

    @contextmanager
    def _running(
        self, chunks: Sequence[Chunk], deltas: Sequence[ResidentDelta | None]
    ) -> Iterator[Callable[[], Tensor]]:
        """Prepare a pass over `chunks` that computes their last tokens' logits; its inputs are on the device."""
        assert self.attention is not None
        positions = [chunk.start + i for chunk in chunks for i in range(chunk.num_tokens)]
        ends = torch.tensor([chunk.num_tokens for chunk in chunks]).cumsum(0) - 1
        inputs = {
            "input_ids": self._ids(1, len(positions)),
            "position_ids": torch.tensor([positions], device=self.device),
            "logits_to_keep": ends.to(self.device),
        }
        with ExitStack() as step:
            if self.context is not None:
                num_tokens = [chunk.num_tokens for chunk in chunks]
                step.enter_context(self.context.step(deltas, num_tokens, [1] * len(chunks)))
            metadata = AttentionMetadata.of(chunks, PAGE_TOKENS, self.device)
            step.enter_context(self.attention.step(metadata))
            yield lambda: self.model(**inputs, use_cache=False).logits

    def _ids(self, rows: int, tokens: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(0)
        size = (rows, tokens)
        return torch.randint(0, self.sizes.vocabulary, size, generator=generator, device=self.device)

    def _free_bytes(self) -> int:
        if self.device.type != "cuda":
            return CPU_MEMORY
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0] * CUDA_SHARE)
