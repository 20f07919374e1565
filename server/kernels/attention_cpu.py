"""Paged attention for sequences with one new token, on the CPU, compiled by numba. Pages are read in place.

A work item is one key head of one sequence with all query heads that share it, so its keys and values are read once.
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

from server.kernels import openmp
from server.kernels.addresses import array, at
from server.kernels.attention import AttentionGroup, AttentionParams

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
def _write(address: int, half: int, values: np.ndarray, factor: np.float32) -> None:
    """Write a vector times a factor to an address, rounded to nearest even."""
    if half:
        short = array(at(address), values.shape, np.uint16)
        for i in range(len(values)):
            value = np.float32(values[i] * factor)
            bits = value.view(np.uint32)
            rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            short[i] = np.uint16(rounded) if value == value else np.uint16(0x7FC0)
    else:
        whole = array(at(address), values.shape, np.float32)
        for i in range(len(values)):
            whole[i] = values[i] * factor


# Reordering sums lets LLVM use vector registers. The other fastmath flags would change NaN and infinity.
@numba.njit(error_model="numpy", fastmath={"reassoc", "contract"})
def _dot(one: np.ndarray, other: np.ndarray) -> np.float32:
    total = np.float32(0)
    for i in range(len(one)):
        total += one[i] * other[i]
    return total


@numba.njit(error_model="numpy")
def _score(job: Any, query: np.ndarray, key: np.ndarray) -> np.float32:
    score = _dot(query, key)
    if job.softcap:
        score = np.float32(job.softcap) * np.float32(np.tanh(score / np.float32(job.softcap)))
    return score


@numba.njit(error_model="numpy")
def _softmax(scores: np.ndarray, sink: np.float32) -> np.float32:
    """Replace scores by unnormalised weights, and return the factor that normalises them together with the sink's."""
    greatest = sink
    for score in scores:
        greatest = max(greatest, score)
    total = np.float32(np.exp(sink - greatest))
    for i in range(len(scores)):
        scores[i] = np.exp(scores[i] - greatest)
        total += scores[i]
    return np.float32(1) / total


@numba.njit(nogil=True, error_model="numpy")
def _attend_share(job: Any, thread: int, num_threads: int) -> None:
    """Process one thread's work items: every `num_threads`-th pair of a sequence and a key head."""
    positions = array(at(job.positions), (job.num_sequences,), np.int64)
    page_table = array(at(job.page_table), (job.num_sequences, job.num_pages), np.int64)
    row_index = array(at(job.row_index), (job.num_sequences,), np.int64)
    group_size = job.num_heads // job.num_kv_heads
    size = 2 if job.half else 4
    query = np.empty((group_size, job.key_dim), np.float32)
    key, value = np.empty(job.key_dim, np.float32), np.empty(job.value_dim, np.float32)
    sums = np.empty((group_size, job.value_dim), np.float32)
    scores = np.empty((group_size, job.num_pages * job.page_tokens), np.float32)
    for item in range(thread, job.num_sequences * job.num_kv_heads, num_threads):
        sequence, kv_head = item // job.num_kv_heads, item % job.num_kv_heads
        last = positions[sequence] + 1
        first = max(0, last - job.window)
        for g in range(group_size):
            head = kv_head * group_size + g
            offset = row_index[sequence] * job.query_row + head * job.query_head
            _read(query[g], job.query + size * offset, job.half)
            for d in range(job.key_dim):
                query[g, d] *= np.float32(job.scaling)
        for t in range(first, last):
            slot = page_table[sequence, t // job.page_tokens] * job.page_tokens + t % job.page_tokens
            _read(key, job.keys + size * (slot * job.num_kv_heads + kv_head) * job.key_dim, job.half)
            for g in range(group_size):
                scores[g, t] = _score(job, query[g], key)
        sums[:] = 0
        factors = np.empty(group_size, np.float32)
        for g in range(group_size):
            sink = np.float32(-np.inf)
            if job.sinks:
                sink = array(at(job.sinks), (job.num_heads,), np.float32)[kv_head * group_size + g]
            factors[g] = _softmax(scores[g, first:last], sink)
        for t in range(first, last):
            slot = page_table[sequence, t // job.page_tokens] * job.page_tokens + t % job.page_tokens
            _read(value, job.values + size * (slot * job.num_kv_heads + kv_head) * job.value_dim, job.half)
            for g in range(group_size):
                weight = scores[g, t]
                for d in range(job.value_dim):
                    sums[g, d] += weight * value[d]
        for g in range(group_size):
            offset = row_index[sequence] * job.output_row + (kv_head * group_size + g) * job.value_dim
            _write(job.output + size * offset, job.half, sums[g], factors[g])


@cache
def compiled_kernel() -> Callable[[bytes, int], None]:
    """Return the kernel as ``call(job, num_threads)``."""
    return openmp.team(_attend_share, JOB)
