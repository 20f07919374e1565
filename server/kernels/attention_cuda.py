"""Attention of one new token per sequence over a paged key-value cache, in Triton: what decoding on CUDA runs.

A program takes the heads that share one key head of one sequence, and a part of that sequence's keys. Where there are
few sequences the parts are many, so that the whole device works; a second kernel adds them up. Nothing that no sequence
owns is read: what lies in other pages, or beyond a sequence's length, may hold anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.kernels.attention import Rules, Sequences

EVERY_KEY = 1 << 30  # the window of a layer that has none
LEAST_PART = 256  # keys: a shorter part would cost more than it gives the device to do
MOST_PARTS = 64
PROGRAMS_PER_CORE = 4  # that keep a multiprocessor's memory requests in flight
BLOCK_BYTES = 16384  # of keys that a program loads at a time
LEAST_BLOCK = 16  # what Triton multiplies in any dimension
MAX_DIM = 256  # of a head
MAX_SHARING = 64  # heads that share one key head


@dataclass(frozen=True, slots=True, eq=False)
class _First:
    """A sequence of one token, to warm up with."""

    rows: Tensor
    table: Tensor
    positions: Tensor


def serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernels take a layer's heads; all three are [1, heads, tokens, a head's size]."""
    sharing = query.shape[1] // key.shape[1]
    fits = max(key.shape[-1], value.shape[-1]) <= MAX_DIM and sharing <= MAX_SHARING
    return fits and query.dtype in (torch.bfloat16, torch.float16, torch.float32)


def attend(
    output: Tensor,  # [tokens, heads, value_dim], contiguous; the sequences' rows are written
    query: Tensor,  # [tokens, heads, key_dim], in the cache's dtype
    cached: tuple[Tensor, Tensor],  # keys [pages, page_tokens, kv heads, key_dim], and values; contiguous
    sequences: Sequences,
    rules: Rules,
) -> None:
    """Each sequence's new token attends to its own keys, up to its own.

    Sums are float32; weights are rounded to the values' dtype before the second product, as flash attention does.
    Nothing waits for the device, and launches depend on shapes alone, so a step can be captured as a CUDA graph.
    """
    keys = cached[0]
    longest = sequences.table.shape[1] * keys.shape[1]
    wanted = PROGRAMS_PER_CORE * _num_cores(keys.device) // (len(sequences.table) * keys.shape[2])
    _launch(output, query, cached, (sequences, rules), max(1, min(wanted, longest // LEAST_PART, MOST_PARTS)))


def prepare(query: Tensor, key: Tensor, value: Tensor, rules: Rules) -> None:
    """Compile what `attend` will run for layers like this one, in one part and in several.

    Args:
        query: ``[tokens, heads, key_dim]`` on the device; one token is enough.
        key: ``[tokens, kv heads, key_dim]``.
        value: ``[tokens, kv heads, value_dim]``.
        rules: the layer's.
    """
    zero = torch.zeros(1, 1, dtype=torch.int64, device=query.device)
    cached = key[None, :1].contiguous(), value[None, :1].contiguous()
    output = query.new_empty(1, query.shape[1], value.shape[2])
    for num_parts in (1, 2):
        _launch(output, query[:1], cached, (_First(zero, zero, zero), rules), num_parts)


@cache
def _num_cores(device: torch.device) -> int:
    """Multiprocessors; 1 where the interpreter runs the kernels."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _launch(
    output: Tensor,
    query: Tensor,
    cached: tuple[Tensor, Tensor],
    task: tuple[Sequences, Rules],
    num_parts: int,
) -> None:
    (keys, values), (sequences, rules) = cached, task
    assert all(part.is_contiguous() for part in (keys, values, output))
    count, num_heads, value_dim = len(sequences.table), query.shape[1], values.shape[3]
    room = (count, num_heads, num_parts, value_dim + 4) if num_parts > 1 else (0,)
    parts = output.new_empty(room, dtype=torch.float32)
    sinks = output if rules.sinks is None else rules.sinks.contiguous()  # some pointer, where there are none
    shared = {
        "HEADS": num_heads,
        "VALUE_DIM": value_dim,
        "BLOCK_VALUE_DIM": _block(value_dim),
        "HAS_SINKS": rules.sinks is not None,
    }
    _attend_part[(count, keys.shape[2], num_parts)](
        output,
        parts,
        query.contiguous(),
        keys,
        values,
        sequences.rows,
        sequences.table.contiguous(),
        sequences.positions,
        sinks,
        sequences.table.shape[1],
        EVERY_KEY if rules.window is None else rules.window,
        keys.shape[3] ** -0.5 if rules.scaling is None else float(rules.scaling),
        float(rules.softcap or 0),
        num_parts,
        HAS_CAP=rules.softcap is not None,
        **_key_sizes(keys, num_heads),
        **shared,
    )
    if num_parts > 1:
        _add_parts[(count, num_heads)](
            output, parts, sequences.rows, sinks, num_parts, BLOCK_PARTS=MOST_PARTS, **shared
        )


def _key_sizes(keys: Tensor, num_heads: int) -> dict[str, int | bool]:
    """What the first kernel is compiled for beside what both are."""
    _, page_tokens, num_shared, key_dim = keys.shape
    return {
        "SHARED": num_shared,
        "KEY_DIM": key_dim,
        "PAGE": page_tokens,
        "BLOCK_HEADS": _block(num_heads // num_shared),
        "BLOCK_KEY_DIM": _block(key_dim),
        "BLOCK_KEYS": max(LEAST_BLOCK, min(128, BLOCK_BYTES // _block(key_dim) // keys.element_size())),
        "IN_FLOAT32": keys.dtype == torch.bfloat16 and _is_interpreted(),
    }


def _is_interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels; it multiplies bfloat16 as if it were integers."""
    return bool(triton.knobs.runtime.interpret)


def _block(size: int) -> int:
    return max(LEAST_BLOCK, int(triton.next_power_of_2(size)))


@triton.jit(do_not_specialize=["num_pages", "window", "num_parts"])
def _attend_part(  # type: ignore[no-untyped-def]
    output,
    parts,  # [sequences, HEADS, num_parts, VALUE_DIM + 4]: values' sum, greatest score, sum of weights, 2 unused
    query,
    keys,
    values,
    rows,
    table,
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
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KEY_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    sequence = tl.program_id(0)
    shared = tl.program_id(1)
    part = tl.program_id(2)
    row = tl.load(rows + sequence)
    position = tl.load(positions + sequence).to(tl.int32)

    first = tl.maximum(position - window + 1, 0)
    share = tl.cdiv(tl.cdiv(position + 1 - first, num_parts), BLOCK_KEYS) * BLOCK_KEYS
    begin = first + part * share
    end = tl.minimum(begin + share, position + 1)

    sharing = tl.arange(0, BLOCK_HEADS)
    is_head = sharing < HEADS // SHARED
    heads = shared * (HEADS // SHARED) + sharing
    key_dims = tl.arange(0, BLOCK_KEY_DIM)
    value_dims = tl.arange(0, BLOCK_VALUE_DIM)
    asked = tl.load(
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
        page = tl.load(table + sequence * num_pages + at // PAGE, mask=seen, other=0)
        place = (page * PAGE + at % PAGE) * SHARED + shared
        key = tl.load(
            keys + place[None, :] * KEY_DIM + key_dims[:, None],
            mask=seen[None, :] & (key_dims < KEY_DIM)[:, None],
            other=0.0,
        )
        scores = _product(asked, key, IN_FLOAT32) * scaling
        if HAS_CAP:
            scores = softcap * _tanh(scores / softcap)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        top = tl.maximum(greatest, tl.max(scores, 1))
        keep = tl.exp(greatest - top)
        weights = tl.exp(scores - top[:, None])
        value = tl.load(
            values + place[:, None] * VALUE_DIM + value_dims[None, :],
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
    shrunk = tl.exp(
        -2 * tl.abs(x)
    )  # cannot overflow; the library's own tanh is not there under the interpreter
    size = (1 - shrunk) / (1 + shrunk)
    return tl.where(x < 0, -size, size)


@triton.jit(do_not_specialize=["num_parts"])
def _add_parts(  # type: ignore[no-untyped-def]
    output,
    parts,
    rows,
    sinks,
    num_parts,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
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
    keep = tl.exp(greatest - top)  # 0 for a part without keys
    weight = tl.sum(weights * keep, 0)
    if HAS_SINKS:
        weight += tl.exp(sink - top)
    sums = tl.load(
        own[:, None] + dims[None, :], mask=is_part[:, None] & (dims < VALUE_DIM)[None, :], other=0.0
    )
    mean = tl.sum(sums * keep[:, None], 0) / weight
    where = output + (tl.load(rows + sequence) * HEADS + head) * VALUE_DIM + dims
    tl.store(where, mean.to(output.dtype.element_ty), mask=dims < VALUE_DIM)
