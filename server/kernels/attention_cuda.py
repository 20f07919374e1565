"""Paged attention for sequences with one new token, on CUDA, in Triton.

A program takes one key head of one sequence, with all query heads that share it, and one part of the sequence's keys.
Few sequences are cut into many parts, so that they occupy the whole device; a second kernel combines the parts. Other
pages, and rows beyond a sequence's length, are never read and may hold anything, NaN included.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.kernels.reference import AttentionGroup, AttentionParams

# The window of a layer without one.
NO_WINDOW = 1 << 30
# Keys in a part, at least: combining a shorter part costs more than the parallelism gains.
MIN_PART = 256
MAX_PARTS = 64
# Programs that keep enough memory requests of a multiprocessor in flight.
PROGRAMS_PER_SM = 4
# Bytes of keys that a program loads at a time.
BLOCK_BYTES = 16384
# The smallest dimension that Triton's matrix product takes.
MIN_BLOCK = 16
MAX_HEAD_DIM = 256
# Query heads that share one key head, at most.
MAX_GROUP_SIZE = 64


def serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the kernels support a layer's heads, each ``[1, heads, tokens, dim]``."""
    group_size = query.shape[1] // key.shape[1]
    fits = max(key.shape[-1], value.shape[-1]) <= MAX_HEAD_DIM and group_size <= MAX_GROUP_SIZE
    return fits and query.dtype in (torch.bfloat16, torch.float16, torch.float32)


def attend(
    output: Tensor,  # [rows, heads, value_dim], contiguous, changed in place
    query: Tensor,  # [rows, heads, key_dim], in the cache's dtype
    cached: tuple[Tensor, Tensor],  # keys and values, [pages, page_tokens, kv heads, dim] each, contiguous
    group: AttentionGroup,
    params: AttentionParams,
) -> None:
    """Write the attention of each sequence's new token to its row of `output`; other rows are left unchanged.

    Sums are float32. Weights are rounded to the values' dtype before the second product, as in FlashAttention.
    Does not synchronise with the device, and launches depend on shapes alone: a step can be captured in a CUDA graph.
    """
    keys = cached[0]
    max_keys = group.page_table.shape[1] * keys.shape[1]
    wanted = PROGRAMS_PER_SM * _num_sms(keys.device) // (len(group.page_table) * keys.shape[2])
    _launch(output, query, cached, (group, params), max(1, min(wanted, max_keys // MIN_PART, MAX_PARTS)))


def prepare(query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> None:
    """Compile the kernels that `attend` runs for layers like this one, with one part and with several.

    Args:
        query: ``[tokens, heads, key_dim]`` on the device; one token is enough.
        key: ``[tokens, kv heads, key_dim]``.
        value: ``[tokens, kv heads, value_dim]``.
        params: the layer's options.
    """
    zero = torch.zeros(1, 1, dtype=torch.int64, device=query.device)
    cached = key[None, :1].contiguous(), value[None, :1].contiguous()
    output = query.new_empty(1, query.shape[1], value.shape[2])
    for num_parts in (1, 2):
        _launch(output, query[:1], cached, (AttentionGroup(zero, zero, zero), params), num_parts)


@cache
def _num_sms(device: torch.device) -> int:
    """Return the number of multiprocessors; 1 if Triton's interpreter runs the kernels."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _launch(
    output: Tensor,
    query: Tensor,
    cached: tuple[Tensor, Tensor],
    task: tuple[AttentionGroup, AttentionParams],
    num_parts: int,
) -> None:
    (keys, values), (group, params) = cached, task
    count, num_heads, value_dim = len(group.page_table), query.shape[1], values.shape[3]
    shape = (count, num_heads, num_parts, value_dim + 4) if num_parts > 1 else (0,)
    parts = output.new_empty(shape, dtype=torch.float32)
    # A kernel needs some pointer even without sinks.
    sinks = output if params.sinks is None else params.sinks.contiguous()
    shared = {
        "HEADS": num_heads,
        "VALUE_DIM": value_dim,
        "BLOCK_VALUE_DIM": _block(value_dim),
        "HAS_SINKS": params.sinks is not None,
    }
    _attend_part[(count, keys.shape[2], num_parts)](
        output,
        parts,
        query.contiguous(),
        keys,
        values,
        group.row_index,
        group.page_table.contiguous(),
        group.positions,
        sinks,
        group.page_table.shape[1],
        NO_WINDOW if params.window is None else params.window,
        keys.shape[3] ** -0.5 if params.scaling is None else float(params.scaling),
        float(params.softcap or 0),
        num_parts,
        HAS_CAP=params.softcap is not None,
        **_key_sizes(keys, num_heads),
        **shared,
    )
    if num_parts > 1:
        _add_parts[(count, num_heads)](
            output, parts, group.row_index, sinks, num_parts, BLOCK_PARTS=MAX_PARTS, **shared
        )


def _key_sizes(keys: Tensor, num_heads: int) -> dict[str, int | bool]:
    """Return the compile-time constants of the first kernel that the second one does not have."""
    _, page_tokens, num_kv_heads, key_dim = keys.shape
    return {
        "KV_HEADS": num_kv_heads,
        "KEY_DIM": key_dim,
        "PAGE": page_tokens,
        "BLOCK_HEADS": _block(num_heads // num_kv_heads),
        "BLOCK_KEY_DIM": _block(key_dim),
        "BLOCK_KEYS": max(MIN_BLOCK, min(128, BLOCK_BYTES // _block(key_dim) // keys.element_size())),
        "IN_FLOAT32": keys.dtype == torch.bfloat16 and _is_interpreted(),
    }


def _is_interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels; it multiplies bfloat16 as if it were integers."""
    return bool(triton.knobs.runtime.interpret)


def _block(size: int) -> int:
    return max(MIN_BLOCK, int(triton.next_power_of_2(size)))


@triton.jit(do_not_specialize=["num_pages", "window", "num_parts"])
def _attend_part(  # type: ignore[no-untyped-def]
    output,
    # [sequences, HEADS, num_parts, VALUE_DIM + 4] float32: weighted sum of values, greatest score, sum of weights, and
    # two unused elements that keep rows aligned.
    parts,
    query,
    keys,
    values,
    row_index,
    page_table,
    positions,
    sinks,
    num_pages,
    window,
    scaling,
    softcap,
    num_parts,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    HAS_CAP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KEY_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Attend with one key head's query heads to one part of a sequence. The grid is [sequences, key heads, parts]."""
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    row = tl.load(row_index + sequence)
    position = tl.load(positions + sequence).to(tl.int32)

    first = tl.maximum(position - window + 1, 0)
    share = tl.cdiv(tl.cdiv(position + 1 - first, num_parts), BLOCK_KEYS) * BLOCK_KEYS
    begin = first + part * share
    end = tl.minimum(begin + share, position + 1)

    group = tl.arange(0, BLOCK_HEADS)
    is_head = group < HEADS // KV_HEADS
    heads = kv_head * (HEADS // KV_HEADS) + group
    key_dims = tl.arange(0, BLOCK_KEY_DIM)
    value_dims = tl.arange(0, BLOCK_VALUE_DIM)
    queries = tl.load(
        query + (row * HEADS + heads[:, None]) * KEY_DIM + key_dims[None, :],
        mask=is_head[:, None] & (key_dims < KEY_DIM)[None, :],
        other=0.0,
    )

    greatest = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_HEADS], tl.float32)
    sums = tl.zeros([BLOCK_HEADS, BLOCK_VALUE_DIM], tl.float32)
    for start in range(begin, end, BLOCK_KEYS):
        at = start + tl.arange(0, BLOCK_KEYS)
        seen = at < end
        page = tl.load(page_table + sequence * num_pages + at // PAGE, mask=seen, other=0)
        slot = (page * PAGE + at % PAGE) * KV_HEADS + kv_head
        key = tl.load(
            keys + slot[None, :] * KEY_DIM + key_dims[:, None],
            mask=seen[None, :] & (key_dims < KEY_DIM)[:, None],
            other=0.0,
        )
        scores = _product(queries, key, IN_FLOAT32) * scaling
        if HAS_CAP:
            scores = softcap * _tanh(scores / softcap)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        top = tl.maximum(greatest, tl.max(scores, 1))
        keep = tl.exp(greatest - top)
        weights = tl.exp(scores - top[:, None])
        value = tl.load(
            values + slot[:, None] * VALUE_DIM + value_dims[None, :],
            mask=seen[:, None] & (value_dims < VALUE_DIM)[None, :],
            other=0.0,
        )
        weight = weight * keep + tl.sum(weights, 1)
        sums = sums * keep[:, None] + _product(weights.to(value.dtype), value, IN_FLOAT32)
        greatest = top

    is_own = is_head[:, None] & (value_dims < VALUE_DIM)[None, :]
    if num_parts == 1:
        if HAS_SINKS:
            sink = tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32)
            top = tl.maximum(greatest, sink)
            keep = tl.exp(greatest - top)
            weight = weight * keep + tl.exp(sink - top)
            sums = sums * keep[:, None]
        where = output + (row * HEADS + heads[:, None]) * VALUE_DIM + value_dims[None, :]
        tl.store(where, (sums / weight[:, None]).to(output.dtype.element_ty), mask=is_own)
    else:
        own = parts + ((sequence * HEADS + heads) * num_parts + part) * (VALUE_DIM + 4)
        tl.store(own[:, None] + value_dims[None, :], sums, mask=is_own)
        tl.store(own + VALUE_DIM, greatest, mask=is_head)
        tl.store(own + VALUE_DIM + 1, weight, mask=is_head)


@triton.jit
def _product(left, right, IN_FLOAT32: tl.constexpr):  # type: ignore[no-untyped-def]
    if IN_FLOAT32:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    # Cannot overflow. Triton's own tanh is missing in its interpreter.
    shrunk = tl.exp(-2 * tl.abs(x))
    size = (1 - shrunk) / (1 + shrunk)
    return tl.where(x < 0, -size, size)


@triton.jit(do_not_specialize=["num_parts"])
def _add_parts(  # type: ignore[no-untyped-def]
    output,
    parts,
    row_index,
    sinks,
    num_parts,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Combine the parts of one head of one sequence. The grid is [sequences, heads]."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    dims = tl.arange(0, BLOCK_VALUE_DIM)
    part = tl.arange(0, BLOCK_PARTS)
    is_part = part < num_parts
    own = parts + ((sequence * HEADS + head) * num_parts + part) * (VALUE_DIM + 4)
    greatest = tl.load(own + VALUE_DIM, mask=is_part, other=float("-inf"))
    weights = tl.load(own + VALUE_DIM + 1, mask=is_part, other=0.0)
    top = tl.max(greatest, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        top = tl.maximum(top, sink)
    # 0 for a part without keys.
    keep = tl.exp(greatest - top)
    weight = tl.sum(weights * keep, 0)
    if HAS_SINKS:
        weight += tl.exp(sink - top)
    sums = tl.load(
        own[:, None] + dims[None, :], mask=is_part[:, None] & (dims < VALUE_DIM)[None, :], other=0.0
    )
    mean = tl.sum(sums * keep[:, None], 0) / weight
    where = output + (tl.load(row_index + sequence) * HEADS + head) * VALUE_DIM + dims
    tl.store(where, mean.to(output.dtype.element_ty), mask=dims < VALUE_DIM)
