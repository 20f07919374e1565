"""Paged attention for sequences with one new token, on the CPU, compiled by numba. Pages are read in place.

A work item is a part of the heads of one sequence. Its pages are read in order, each for all these heads: a page is
contiguous, so hardware prefetchers follow.
Other pages, and rows beyond a sequence's length, are never read and may hold anything, NaN included.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from server.kernels import openmp, vectors
from server.kernels.openmp import array, at
from server.kernels.reference import AttentionGroup, AttentionParams

# Dimensions of a long chunk.
LONG_CHUNK = vectors.LONG * vectors.LANES
# The least exponent whose power is a normal float32.
LEAST_EXPONENT = np.float32(-87)
LOG2_E = np.float32(1.44269504)
LOG_2_HIGH, LOG_2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
# Coefficients of the Taylor series of exp, that of the highest power first.
TAYLOR = tuple(np.float32(1 / k) for k in (720, 120, 24, 6, 2, 1, 1))
# The window of a layer without one.
NO_WINDOW = 1 << 62
# Dtypes that the kernel reads and writes, by the value of its flag `half`.
HALF = {torch.float32: 0, torch.bfloat16: 1}

# The kernel's argument: addresses, strides in elements, sizes, and two floats.
JOB = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("output", "query", "keys", "values", "row_index", "page_table", "positions", "sinks", "half"),
            *("output_row", "query_row", "query_head", "num_sequences", "num_pages", "page_tokens"),
            *("num_heads", "num_kv_heads", "key_dim", "value_dim", "window"),
        )
    ]
    + [("scaling", np.float64), ("softcap", np.float64)]
)


def serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the kernel supports a layer's heads, each ``[1, heads, tokens, dim]``."""
    return query.dtype in HALF and query.dtype == key.dtype == value.dtype


def prepare(query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> None:
    """Compile the kernel at start-up, or load it. One version serves all layers."""
    compiled_kernel()


def attend(
    output: Tensor,  # [rows, heads, value_dim], contiguous, changed in place
    query: Tensor,  # [rows, heads, key_dim], in the dtype of output and cache
    cached: tuple[Tensor, Tensor],  # keys and values, [pages, page_tokens, kv heads, dim] each, contiguous
    group: AttentionGroup,
    params: AttentionParams,
) -> None:
    """Write the attention of each sequence's new token to its row of `output`; other rows are left unchanged.

    Sums are float32; each output is rounded once, to nearest even.
    """
    keys, values = cached
    if query.stride(2) != 1:
        query = query.contiguous()
    sinks = None if params.sinks is None else params.sinks.float().contiguous()
    page_table, row_index, positions = group.page_table, group.row_index, group.positions
    job = np.array(
        (
            *(output.data_ptr(), query.data_ptr(), keys.data_ptr(), values.data_ptr(), row_index.data_ptr()),
            *(page_table.data_ptr(), positions.data_ptr(), 0 if sinks is None else sinks.data_ptr()),
            *(HALF[query.dtype], output.stride(0), query.stride(0), query.stride(1)),
            *(
                *page_table.shape,
                keys.shape[1],
                query.shape[1],
                keys.shape[2],
                keys.shape[3],
                values.shape[3],
            ),
            NO_WINDOW if params.window is None else params.window,
            query.shape[2] ** -0.5 if params.scaling is None else params.scaling,
            params.softcap or 0.0,
        ),
        JOB,
    )
    compiled_kernel()(job.tobytes(), torch.get_num_threads())


@numba.njit(error_model="numpy")
def _read(into: np.ndarray, address: int, half: int) -> None:
    """Read the vector at an address as float32."""
    if half:
        short = array(at(address), into.shape, np.uint16)
        for i in range(len(into)):
            into[i] = np.uint32(np.uint32(short[i]) << np.uint32(16)).view(np.float32)
    else:
        whole = array(at(address), into.shape, np.float32)
        for i in range(len(into)):
            into[i] = whole[i]


@numba.njit(error_model="numpy")
def _write(address: int, half: int, values: np.ndarray) -> None:
    """Write a vector to an address, rounded to nearest even."""
    if half:
        short = array(at(address), values.shape, np.uint16)
        for i in range(len(values)):
            value = np.float32(values[i])
            bits = value.view(np.uint32)
            rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            short[i] = np.uint16(rounded) if value == value else np.uint16(0x7FC0)
    else:
        whole = array(at(address), values.shape, np.float32)
        for i in range(len(values)):
            whole[i] = values[i]


_SCORES_LONG_HALF, _SCORES_LONG_FULL = (
    vectors.add_scores(vectors.LONG, True),
    vectors.add_scores(vectors.LONG, False),
)
_SCORES_HALF, _SCORES_FULL = vectors.add_scores(1, True), vectors.add_scores(1, False)
_VALUES_LONG_HALF, _VALUES_LONG_FULL = (
    vectors.add_values(vectors.LONG, True),
    vectors.add_values(vectors.LONG, False),
)
_VALUES_HALF, _VALUES_FULL = vectors.add_values(1, True), vectors.add_values(1, False)


@numba.njit(error_model="numpy")
def _one(address: int, half: int) -> np.float32:
    """Read one number."""
    if half:
        return np.uint32(np.uint32(array(at(address), 1, np.uint16)[0]) << np.uint32(16)).view(np.float32)
    return np.float32(array(at(address), 1, np.float32)[0])


@numba.njit(error_model="numpy")
def _add_scores(query: np.ndarray, keys: int, half: int, stride: int, scores: np.ndarray) -> None:
    """Add the products of a head's query with the keys of a run of tokens, `stride` bytes apart, to their scores."""
    size = 2 if half else 4
    d, num, into = 0, len(scores), scores.ctypes.data
    while d + LONG_CHUNK <= len(query):
        if half:
            _SCORES_LONG_HALF(query[d:].ctypes.data, keys + size * d, stride, num, into)
        else:
            _SCORES_LONG_FULL(query[d:].ctypes.data, keys + size * d, stride, num, into)
        d += LONG_CHUNK
    while d + vectors.LANES <= len(query):
        if half:
            _SCORES_HALF(query[d:].ctypes.data, keys + size * d, stride, num, into)
        else:
            _SCORES_FULL(query[d:].ctypes.data, keys + size * d, stride, num, into)
        d += vectors.LANES
    for rest in range(d, len(query)):
        for t in range(num):
            scores[t] += query[rest] * _one(keys + stride * t + size * rest, half)


@numba.njit(error_model="numpy")
def _add_values(weights: np.ndarray, values: int, half: int, stride: int, sums: np.ndarray) -> None:
    """Add the values of a run of tokens, `stride` bytes apart, times their weights to a head's sums."""
    size = 2 if half else 4
    d, num, own = 0, len(weights), weights.ctypes.data
    while d + LONG_CHUNK <= len(sums):
        if half:
            _VALUES_LONG_HALF(own, values + size * d, stride, num, sums[d:].ctypes.data)
        else:
            _VALUES_LONG_FULL(own, values + size * d, stride, num, sums[d:].ctypes.data)
        d += LONG_CHUNK
    while d + vectors.LANES <= len(sums):
        if half:
            _VALUES_HALF(own, values + size * d, stride, num, sums[d:].ctypes.data)
        else:
            _VALUES_FULL(own, values + size * d, stride, num, sums[d:].ctypes.data)
        d += vectors.LANES
    for rest in range(d, len(sums)):
        for t in range(num):
            sums[rest] += weights[t] * _one(values + stride * t + size * rest, half)


@numba.njit(error_model="numpy", fastmath={"reassoc"})
def _sum(values: np.ndarray) -> np.float32:
    total = np.float32(0)
    for value in values:
        total += value
    return total


@numba.njit(error_model="numpy")
def _cap(scores: np.ndarray, softcap: np.float32) -> None:
    for i in range(len(scores)):
        scores[i] = softcap * np.float32(np.tanh(scores[i] / softcap))


@numba.njit(error_model="numpy", fastmath={"contract"})
def exp(x: np.float32) -> np.float32:
    """Return ``exp(x)`` for x of at most 0 with an error of 2 ulp, in operations that LLVM can put into vectors.

    It is ``2 ** n * exp(r)`` with an integer n and r of at most ``log(2) / 2``, by its Taylor series.
    """
    # The greatest score has the weight 1, beside which smaller powers vanish.
    clipped = x if x > LEAST_EXPONENT else LEAST_EXPONENT
    n = np.rint(clipped * LOG2_E)
    # log(2) in two parts, so that r is exact.
    r = (clipped - n * LOG_2_HIGH) - n * LOG_2_LOW
    series = np.float32(1 / 5040)
    for divisor in TAYLOR:
        series = series * r + divisor
    scaled = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32) * series
    return scaled if x == x else x


@numba.njit(error_model="numpy")
def _softmax(scores: np.ndarray, sink: np.float32) -> None:
    """Replace scores by their softmax, in which the sink's score takes part."""
    greatest = sink
    for score in scores:
        greatest = max(greatest, score)
    for i in range(len(scores)):
        scores[i] = exp(scores[i] - greatest)
    factor = np.float32(1) / (np.float32(np.exp(sink - greatest)) + _sum(scores))
    for i in range(len(scores)):
        scores[i] *= factor


@numba.njit(error_model="numpy")
def _run(pages: np.ndarray, begin: int, last: int, page_tokens: int) -> tuple[int, int]:
    """Return the end of the tokens from `begin` on that are in one page, and the slot of the first of them."""
    page, offset = begin // page_tokens, begin % page_tokens
    return min(last, begin - offset + page_tokens), pages[page] * page_tokens + offset


@numba.njit(error_model="numpy")
def _read_queries(job: Any, row: int, first_head: int, queries: np.ndarray) -> None:
    """Read a row's query heads from `first_head` on, [heads, key_dim], times the scaling."""
    for h in range(len(queries)):
        offset = row * job.query_row + (first_head + h) * job.query_head
        _read(queries[h], job.query + (2 if job.half else 4) * offset, job.half)
        for d in range(job.key_dim):
            queries[h, d] *= np.float32(job.scaling)


@numba.njit(error_model="numpy")
def _to_weights(job: Any, first_head: int, tokens: tuple[int, int], scores: np.ndarray) -> None:
    """Replace the scores of the query heads from `first_head` on, [heads, tokens], by weights."""
    first, last = tokens
    for h in range(len(scores)):
        sink = np.float32(-np.inf)
        if job.sinks:
            sink = array(at(job.sinks), (job.num_heads,), np.float32)[first_head + h]
        if job.softcap:
            _cap(scores[h, first:last], np.float32(job.softcap))
        # A slice of all rows would be strided, and not computed with vectors.
        _softmax(scores[h, first:last], sink)


@numba.njit(error_model="numpy")
def _attend_heads(
    job: Any,
    pages: np.ndarray,  # [pages] int64: the sequence's
    first_head: int,  # the first of the query heads
    tokens: tuple[int, int],  # the first that is attended to and the one after the last
    memory: tuple[
        np.ndarray, np.ndarray, np.ndarray
    ],  # [heads, ...]: queries; scores, overwritten; sums, the result
) -> None:
    """Attend to one sequence's tokens with all query heads of some key heads, page by page."""
    queries, scores, sums = memory
    first, last = tokens
    size, group_size = 2 if job.half else 4, job.num_heads // job.num_kv_heads
    key_stride = size * job.num_kv_heads * job.key_dim
    value_stride = size * job.num_kv_heads * job.value_dim
    scores[:, first:last] = 0
    sums[:] = 0
    begin = first
    while begin < last:
        end, slot = _run(pages, begin, last, job.page_tokens)
        for h in range(len(queries)):
            keys = job.keys + slot * key_stride + (first_head + h) // group_size * size * job.key_dim
            _add_scores(queries[h], keys, job.half, key_stride, scores[h, begin:end])
        begin = end
    _to_weights(job, first_head, tokens, scores)
    begin = first
    while begin < last:
        end, slot = _run(pages, begin, last, job.page_tokens)
        for h in range(len(queries)):
            values = job.values + slot * value_stride + (first_head + h) // group_size * size * job.value_dim
            _add_values(scores[h, begin:end], values, job.half, value_stride, sums[h])
        begin = end


@numba.njit(nogil=True, error_model="numpy")
def _attend_share(job: Any, thread: int, num_threads: int) -> None:
    """Process one thread's work items: a part of the heads of every few sequences.

    Heads are divided into as many equal parts as threads can share evenly, and the sequences among the threads of a
    part.
    """
    positions = array(at(job.positions), (job.num_sequences,), np.int64)
    page_table = array(at(job.page_table), (job.num_sequences, job.num_pages), np.int64)
    row_index = array(at(job.row_index), (job.num_sequences,), np.int64)
    num_parts = np.gcd(job.num_kv_heads, num_threads)
    num_heads = job.num_heads // num_parts
    first_head = thread % num_parts * num_heads
    queries = np.empty((num_heads, job.key_dim), np.float32)
    scores = np.empty((num_heads, job.num_pages * job.page_tokens), np.float32)
    sums = np.empty((num_heads, job.value_dim), np.float32)
    for sequence in range(thread // num_parts, job.num_sequences, num_threads // num_parts):
        row, last = row_index[sequence], positions[sequence] + 1
        _read_queries(job, row, first_head, queries)
        tokens = (max(0, last - job.window), last)
        _attend_heads(job, page_table[sequence], first_head, tokens, (queries, scores, sums))
        for h in range(num_heads):
            offset = row * job.output_row + (first_head + h) * job.value_dim
            _write(job.output + (2 if job.half else 4) * offset, job.half, sums[h])


@cache
def compiled_kernel() -> Callable[[bytes, int], None]:
    """Return the kernel as ``call(job, num_threads)``."""
    return openmp.team(_attend_share, JOB)
