"""Compare the device's kernels with the reference at odd shapes, with NaN wherever no kernel may read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu.measure import Rows
from deltastore.format.matrix import packed_width
from server import kernels
from server.kernels import attention_cuda, reference
from server.kernels.reference import FIELDS, AttentionGroup, AttentionParams, row_of

SHAPES = ((1, 1), (7, 5), (33, 100), (130, 129), (96, 4096), (257, 1023))  # out, in
# Ranges of rows; rows between them belong to no group.
GROUPS = (
    ((0, 1), (1, 3)),
    ((2, 2), (2, 19)),
    ((1, 40), (41, 42), (42, 170)),
)
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
