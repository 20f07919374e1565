"""Attention of one new token per sequence over a paged key-value cache, on the CPU: pages are read where they are.

A thread takes the heads that share one key head of one sequence: their keys once, then a softmax, then their values.
Nothing that no sequence owns is read: what lies in other pages, or beyond a sequence's length, may hold anything.
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
from server.kernels.attention import Rules, Sequences

EVERY_KEY = 1 << 62  # the window of a layer that has none
HALF = {torch.float32: 0, torch.bfloat16: 1}

# What the compiled kernel is given: addresses, strides in elements, sizes, and two numbers.
JOB = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("output", "query", "keys", "values", "rows", "table", "positions", "sinks", "half"),
            *("output_row", "query_row", "query_head", "num_sequences", "num_pages", "page_tokens"),
            *("num_heads", "num_shared", "key_dim", "value_dim", "window"),
        )
    ]
    + [("scaling", np.float64), ("softcap", np.float64)]
)


def serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether heads like these, ``[1, heads, tokens, dim]``, can be attended to here."""
    return query.dtype in HALF and query.dtype == key.dtype == value.dtype


def prepare(query: Tensor, key: Tensor, value: Tensor, rules: Rules) -> None:
    """Compile, which takes seconds that no request should wait for."""
    _team()


def attend(
    output: Tensor,  # [rows, heads, value_dim], contiguous, changed in place
    query: Tensor,  # [rows, heads, key_dim]
    cache: tuple[Tensor, Tensor],  # keys and values, [pages, page_tokens, kv heads, dim] each
    sequences: Sequences,
    rules: Rules,
) -> None:
    """Write the attention of each sequence's new token to its row of `output`; other rows stay as they are."""
    keys, values = cache
    if query.stride(2) != 1:
        query = query.contiguous()
    sinks = None if rules.sinks is None else rules.sinks.float().contiguous()
    table, rows, positions = sequences.table, sequences.rows, sequences.positions
    job = np.array(
        (
            *(output.data_ptr(), query.data_ptr(), keys.data_ptr(), values.data_ptr(), rows.data_ptr()),
            *(table.data_ptr(), positions.data_ptr(), 0 if sinks is None else sinks.data_ptr()),
            *(HALF[query.dtype], output.stride(0), query.stride(0), query.stride(1)),
            *(*table.shape, keys.shape[1], query.shape[1], keys.shape[2], keys.shape[3], values.shape[3]),
            EVERY_KEY if rules.window is None else rules.window,
            query.shape[2] ** -0.5 if rules.scaling is None else rules.scaling,
            rules.softcap or 0.0,
        ),
        JOB,
    )
    _team()(job.tobytes(), torch.get_num_threads())


@numba.njit(error_model="numpy")
def _read(into: np.ndarray, address: int, half: int) -> None:
    """Numbers at an address, as float32."""
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
    """Numbers times a factor to an address, rounded to nearest even."""
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


# Sums in any order are what vectors need; NaN and infinity stay what they are.
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
    """Turn scores into weights in place, and return the factor that makes their sum, the sink's included, one."""
    most = sink
    for score in scores:
        most = max(most, score)
    total = np.float32(np.exp(sink - most))
    for i in range(len(scores)):
        scores[i] = np.exp(scores[i] - most)
        total += scores[i]
    return np.float32(1) / total


@numba.njit(nogil=True, error_model="numpy")
def _share(job: Any, thread: int, num_threads: int) -> None:
    """One thread's sequences and key heads: every `num_threads`-th."""
    positions = array(at(job.positions), (job.num_sequences,), np.int64)
    table = array(at(job.table), (job.num_sequences, job.num_pages), np.int64)
    rows = array(at(job.rows), (job.num_sequences,), np.int64)
    num_sharing = job.num_heads // job.num_shared
    size = 2 if job.half else 4
    query = np.empty((num_sharing, job.key_dim), np.float32)
    key, value = np.empty(job.key_dim, np.float32), np.empty(job.value_dim, np.float32)
    sums = np.empty((num_sharing, job.value_dim), np.float32)
    scores = np.empty((num_sharing, job.num_pages * job.page_tokens), np.float32)
    for item in range(thread, job.num_sequences * job.num_shared, num_threads):
        sequence, shared = item // job.num_shared, item % job.num_shared
        last = positions[sequence] + 1
        first = max(0, last - job.window)
        for g in range(num_sharing):
            head = shared * num_sharing + g
            place = rows[sequence] * job.query_row + head * job.query_head
            _read(query[g], job.query + size * place, job.half)
            for d in range(job.key_dim):
                query[g, d] *= np.float32(job.scaling)
        for t in range(first, last):
            place = (
                table[sequence, t // job.page_tokens] * job.page_tokens + t % job.page_tokens
            ) * job.num_shared
            _read(key, job.keys + size * (place + shared) * job.key_dim, job.half)
            for g in range(num_sharing):
                scores[g, t] = _score(job, query[g], key)
        sums[:] = 0
        factors = np.empty(num_sharing, np.float32)
        for g in range(num_sharing):
            sink = np.float32(-np.inf)
            if job.sinks:
                sink = array(at(job.sinks), (job.num_heads,), np.float32)[shared * num_sharing + g]
            factors[g] = _softmax(scores[g, first:last], sink)
        for t in range(first, last):
            place = (
                table[sequence, t // job.page_tokens] * job.page_tokens + t % job.page_tokens
            ) * job.num_shared
            _read(value, job.values + size * (place + shared) * job.value_dim, job.half)
            for g in range(num_sharing):
                weight = scores[g, t]
                for d in range(job.value_dim):
                    sums[g, d] += weight * value[d]
        for g in range(num_sharing):
            place = rows[sequence] * job.output_row + (shared * num_sharing + g) * job.value_dim
            _write(job.output + size * place, job.half, sums[g], factors[g])


@cache
def _team() -> Callable[[bytes, int], None]:
    return openmp.team(_share, JOB)
