"""The products of deltas on CUDA, in Triton. Launches depend on shapes alone: a step can be captured in a CUDA graph.

A program computes a block of outputs for one tile of a slot's rows, over one part of the inputs. Signs stay packed
until they are in registers. The eight signs of a byte are operands of eight products, each with the inputs at the same
bit, so a byte is loaded once and no sign is moved between threads. A sign is shifted into the sign bit of a constant
one: two instructions and no conversion. If the inputs are cut into parts, the last program to finish adds the partial
sums in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.kernels.reference import (
    BASE_BIAS,
    BIAS,
    FIELDS,
    GAIN,
    LEFT,
    MAX_PLANES,
    PLANE_FIELDS,
    RANK,
    RIGHT,
    SCALE_IN,
    SCALE_OUT,
    SINGLE,
    WHOLE,
    WHOLE_DTYPE,
    WHOLE_ROWS,
)

# Batches of at most this many rows take one launch. Larger ones take two: for slots with few rows, and with many.
SMALL_BATCH = 64
# Rows of a slot with few, at most.
SHORT_GROUP = 32
# Slots that kernels are compiled for. More slots compile them once again, at start.
SLOTS = 64
# Programs for the parts of one slot, about two per multiprocessor of the largest devices.
PROGRAMS = 256
# Bytes of a row of signs in a part, at least: adding up shorter parts costs more than they gain.
MIN_PART = 128
# Features of an embedding row per program.
FEATURES = 1024
MAX_COUNTERS = 1 << 16
# The bits of -1 in each dtype.
MINUS_ONE = {torch.bfloat16: 0xBF80, torch.float16: 0xBC00, torch.float32: 0xBF800000}


@dataclass(frozen=True, slots=True)
class Tiling:
    """The block sizes of a product. Chosen by calculation for Hopper."""

    rows: int  # of a slot per program; tensor cores need 16 at least
    outputs: int  # per program
    num_bytes: int  # of each output's signs per iteration of a program's loop
    num_warps: int
    num_stages: int  # of Triton's software pipeline of loads


DECODE = Tiling(rows=16, outputs=64, num_bytes=32, num_warps=4, num_stages=4)
PREFILL = Tiling(rows=128, outputs=128, num_bytes=16, num_warps=8, num_stages=3)


def add_planes(
    output: Tensor,  # [rows, out of all parts], any float dtype, changed in place
    x: Tensor,  # [rows, in], any float dtype
    table: Tensor,  # [parts, slots, FIELDS] int64; addresses of signs are multiples of 16, as they are in slots
    order: Tensor,  # [positions] int32
    ranges: Tensor,  # [slots, 2] int32
    ends: Sequence[int],
) -> None:
    """Compute `server.kernels.add_planes`, with scaled inputs rounded to their dtype for the tensor cores."""
    if x.stride(1) != 1 or x.dtype not in MINUS_ONE:
        x = x.to(x.dtype if x.dtype in MINUS_ONE else torch.float32).contiguous()
    begin = 0
    for own, end in zip(table, ends, strict=True):
        part = output[:, begin:end]
        if len(x) <= SMALL_BATCH:
            _launch(part, x, own, order, ranges, DECODE, (0, len(x)))
        else:
            _launch(part, x, own, order, ranges, DECODE, (0, SHORT_GROUP))
            _launch(part, x, own, order, ranges, PREFILL, (SHORT_GROUP, len(x)))
        begin = end


def add_rows(
    output: Tensor,  # [rows, in], any float dtype, changed in place
    ids: Tensor,  # [rows] int64
    table: Tensor,  # [1 or 2, slots, FIELDS] int64
    order: Tensor,  # [positions] int32
    ranges: Tensor,  # [slots, 2] int32
    num_ids: int,
    scale: float,
) -> None:
    """Compute `server.kernels.add_rows`."""
    (num_rows, in_features), (num_parts, num_slots, _) = output.shape, table.shape
    _add_rows[(num_rows, triton.cdiv(in_features, FEATURES))](
        *(output, *output.stride(), ids.contiguous(), table, order, ranges, num_slots, num_ids, scale),
        IN=in_features,
        PARTS=num_parts,
        BLOCK=FEATURES,
        SLOTS=_num_slots(num_slots),
    )


def prepare(device: torch.device, shapes: set[tuple[int, int]], dtype: torch.dtype) -> None:
    """Compile everything that requests need.

    The number of rows, and that of slots up to SLOTS, do not change the compiled code.

    Args:
        device: the CUDA device.
        shapes: out and in of the matrices that deltas change.
        dtype: of the model.
    """
    table = torch.zeros(2, 1, FIELDS, dtype=torch.int64, device=device)
    order = torch.zeros(SMALL_BATCH + 1, dtype=torch.int32, device=device)
    ranges = torch.zeros(1, 2, dtype=torch.int32, device=device)
    for out_features, in_features in sorted(shapes):
        for num_rows in (1, SMALL_BATCH + 1):
            x = torch.zeros(num_rows, in_features, dtype=dtype, device=device)
            output = torch.zeros(num_rows, out_features, dtype=dtype, device=device)
            add_planes(output, x, table[:1], order, ranges, [out_features])
        ids = torch.zeros(1, dtype=torch.int64, device=device)
        rows = torch.zeros(1, in_features, dtype=dtype, device=device)
        add_rows(rows, ids, table, order, ranges, out_features, 1.0)


def _launch(
    output: Tensor,
    x: Tensor,
    table: Tensor,  # [slots, FIELDS] int64
    order: Tensor,
    ranges: Tensor,
    tiling: Tiling,
    lengths: tuple[int, int],
) -> None:
    """Launch the products of the slots whose number of rows is above the first of `lengths` and at most the second.

    Raises:
        RuntimeError: the batch has more tiles than there are counters.
    """
    (num_rows, out_features), in_features, num_slots = output.shape, x.shape[1], len(ranges)
    least, most = lengths
    # An upper bound on the tiles of rows, however the rows are divided among the slots.
    num_tiles = min(num_rows, num_rows // tiling.rows + num_slots, num_slots * triton.cdiv(most, tiling.rows))
    num_blocks = triton.cdiv(out_features, tiling.outputs)
    num_parts = 1
    if tiling is DECODE:
        # Depends on the layer's shape alone, so that a row's sum does not depend on the rest of the batch.
        num_parts = max(1, min(PROGRAMS // num_blocks, in_features // 8 // MIN_PART))
    size = num_tiles * num_blocks * num_parts * tiling.outputs * tiling.rows if num_parts > 1 else 1
    if num_parts > 1 and num_tiles * num_blocks > MAX_COUNTERS:
        raise RuntimeError(
            f"{num_slots} deltas in a batch of {num_rows} rows are too many for one step: lower --max-gpu-deltas"
        )
    _add_product[(num_blocks, num_parts, num_tiles)](
        *(output, *output.stride(), x, x.stride(0), table, order, ranges, num_slots, least, most),
        torch.empty(size, dtype=torch.float32, device=x.device),
        _counters(x.device),
        OUT=out_features,
        IN=in_features,
        PARTS=num_parts,
        ROWS=tiling.rows,
        OUTPUTS=tiling.outputs,
        BYTES=tiling.num_bytes,
        SLOTS=_num_slots(num_slots),
        MINUS_ONE=MINUS_ONE[x.dtype],
        IN_FLOAT32=x.dtype == torch.bfloat16 and _is_interpreted(),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


def _num_slots(num_slots: int) -> int:
    return max(SLOTS, int(triton.next_power_of_2(num_slots)))


@cache
def _counters(device: torch.device) -> Tensor:
    """Return the counters of finished parts per block. Kernels leave zeros; only one stream may use them at a time."""
    return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)


def _is_interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels; it multiplies bfloat16 as if it were integers."""
    return bool(triton.knobs.runtime.interpret)


# The columns of a table, as constants that Triton reads.
_FIELDS, _PLANES, _PLANE_FIELDS = tl.constexpr(FIELDS), tl.constexpr(MAX_PLANES), tl.constexpr(PLANE_FIELDS)
_SCALE_OUT, _SCALE_IN, _GAIN = tl.constexpr(SCALE_OUT), tl.constexpr(SCALE_IN), tl.constexpr(GAIN)
_LEFT, _RIGHT, _RANK = tl.constexpr(LEFT), tl.constexpr(RIGHT), tl.constexpr(RANK)
_WHOLE, _WHOLE_ROWS, _WHOLE_DTYPE = (tl.constexpr(column) for column in (WHOLE, WHOLE_ROWS, WHOLE_DTYPE))
_BIAS, _BASE_BIAS, _SINGLE = tl.constexpr(BIAS), tl.constexpr(BASE_BIAS), tl.constexpr(SINGLE)
_RANKS = tl.constexpr(16)  # of a low-rank part at a time; tensor cores need 16 at least


# Only arguments that are constant for a layer may be specialised on, so that no request compiles anything.
@triton.jit(
    do_not_specialize=["output_stride", "feature_stride", "num_slots", "least", "most"],
    do_not_specialize_on_alignment=["output", "table", "order", "ranges", "partial"],
)
def _add_product(  # type: ignore[no-untyped-def]
    output,
    output_stride,
    feature_stride,
    x,
    x_stride,
    table,
    order,
    ranges,
    num_slots,
    least,
    most,
    partial,  # [tiles, blocks, PARTS, OUTPUTS, ROWS] float32 if PARTS > 1
    counters,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BYTES: tl.constexpr,
    SLOTS: tl.constexpr,
    MINUS_ONE: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):
    """Add one block of outputs of one tile of rows. The grid is [blocks of outputs, parts of inputs, tiles of rows]."""
    slot, begin, stop = _tile(ranges, num_slots, tl.program_id(2), least, most, ROWS, SLOTS)
    if begin >= stop:
        return
    own = table + _FIELDS * slot
    whole, left, bias = tl.load(own + _WHOLE), tl.load(own + _LEFT), tl.load(own + _BIAS)
    if (tl.load(own) == 0) & (whole == 0) & (left == 0) & (bias == 0):
        return
    WIDTH: tl.constexpr = (IN + 7) // 8
    SHARE: tl.constexpr = ((WIDTH + PARTS - 1) // PARTS + BYTES - 1) // BYTES * BYTES
    block, part = tl.program_id(0), tl.program_id(1)
    first_byte, last_byte = part * SHARE, tl.minimum(part * SHARE + SHARE, WIDTH)
    outputs = block * OUTPUTS + tl.arange(0, OUTPUTS)
    num_outputs = OUT
    if whole != 0:
        num_outputs = tl.minimum(OUT, tl.load(own + _WHOLE_ROWS)).to(tl.int32)
    positions = begin + tl.arange(0, ROWS)
    is_row = positions < stop
    rows = x + tl.load(order + positions, mask=is_row, other=0).to(tl.int64) * x_stride
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for plane in range(_PLANES):
        fields = own + _PLANE_FIELDS * plane
        address = tl.load(fields)
        if address != 0:
            signs = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)
            scale_in = tl.load(fields + _SCALE_IN)
            sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
            for first in range(first_byte, last_byte, BYTES):
                own_bytes = first + tl.arange(0, BYTES)
                packed = tl.load(
                    signs + outputs.to(tl.int64)[:, None] * WIDTH + own_bytes[None, :],
                    mask=(outputs < OUT)[:, None] & (own_bytes < WIDTH)[None, :],
                    other=0,
                )
                inputs = 8 * first + tl.arange(0, 8 * BYTES)
                values = tl.load(
                    rows[:, None] + inputs[None, :], mask=is_row[:, None] & (inputs < IN)[None, :], other=0.0
                )
                factors = tl.load(
                    scale_in.to(tl.pointer_type(tl.float16)) + inputs,
                    mask=(inputs < IN) & (scale_in != 0),
                    other=1.0,
                ).to(tl.float32)
                scaled = (values.to(tl.float32) * factors[None, :]).to(values.dtype)
                sums = _eight_products(sums, packed, scaled, ROWS, BYTES, MINUS_ONE, IN_FLOAT32)
            scale_out = tl.load(fields + _SCALE_OUT)
            is_single = (tl.load(own + _SINGLE) >> plane) & 1
            factors_out = tl.load(
                scale_out.to(tl.pointer_type(tl.float16)) + outputs * (1 - is_single),
                mask=(outputs < OUT) & (scale_out != 0),
                other=1.0,
            ).to(tl.float32)
            gain = tl.load(tl.load(fields + _GAIN).to(tl.pointer_type(tl.float32)))
            total += sums * (factors_out * gain)[:, None]
    if left != 0:
        total = _add_low_rank(
            total, own, left, rows, is_row, outputs, first_byte, last_byte, OUT, IN, ROWS, BYTES
        )
    if whole != 0:
        for first in range(first_byte, last_byte, BYTES):
            inputs = 8 * first + tl.arange(0, 8 * BYTES)
            values = tl.load(
                rows[:, None] + inputs[None, :], mask=is_row[:, None] & (inputs < IN)[None, :], other=0.0
            )
            weights = _whole(
                whole,
                outputs.to(tl.int64)[:, None] * IN + inputs[None, :],
                (outputs < num_outputs)[:, None] & (inputs < IN)[None, :],
                tl.load(own + _WHOLE_DTYPE),
            )
            total = tl.dot(weights, tl.trans(values.to(tl.float32)), acc=total, input_precision="ieee")

    if PARTS > 1:
        first_part = (tl.program_id(2) * tl.num_programs(0) + block) * PARTS
        cells = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        sums = partial + first_part.to(tl.int64) * (OUTPUTS * ROWS) + cells
        is_cell = is_row[None, :] & (outputs >= 0)[:, None]
        tl.store(sums + part * (OUTPUTS * ROWS), total, mask=is_cell)
        # All threads of the program must have written before the part counts as finished.
        tl.debug_barrier()
        if tl.atomic_add(counters + first_part // PARTS, 1, sem="acq_rel") < PARTS - 1:
            return
        total = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for number in range(PARTS):
            total += tl.load(sums + number * (OUTPUTS * ROWS), mask=is_cell, other=0.0, cache_modifier=".cg")
        tl.store(counters + first_part // PARTS, 0)

    base_bias = tl.load(own + _BASE_BIAS)
    if (bias != 0) | ((whole != 0) & (base_bias != 0)):
        added = _bias(bias, outputs, OUT)
        if (whole == 0) | (bias == 0):
            added -= _bias(base_bias, outputs, OUT)
        if bias == 0:
            added = -added
        total += added[:, None]
    number = tl.load(order + positions, mask=is_row, other=0).to(tl.int64)
    where = output + number[None, :] * output_stride + outputs.to(tl.int64)[:, None] * feature_stride
    is_own = (outputs < num_outputs)[:, None] & is_row[None, :]
    before = tl.load(where, mask=is_own & (whole == 0), other=0.0).to(tl.float32)
    tl.store(where, (before + total).to(output.dtype.element_ty), mask=is_own)


@triton.jit
def _add_low_rank(  # type: ignore[no-untyped-def]
    total,  # [OUTPUTS, ROWS] float32
    own,
    left,
    rows,
    is_row,
    outputs,
    first_byte,
    last_byte,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Add the low-rank part's product with the inputs from 8 `first_byte` on; it is linear in them."""
    rank = tl.load(own + _RANK).to(tl.int32)
    left_at = left.to(tl.pointer_type(tl.float16))
    right_at = tl.load(own + _RIGHT).to(tl.pointer_type(tl.float16))
    for first_rank in range(0, rank, _RANKS):
        ranks = first_rank + tl.arange(0, _RANKS)
        inner = tl.zeros([_RANKS, ROWS], tl.float32)
        for first in range(first_byte, last_byte, BYTES):
            inputs = 8 * first + tl.arange(0, 8 * BYTES)
            values = tl.load(
                rows[:, None] + inputs[None, :], mask=is_row[:, None] & (inputs < IN)[None, :], other=0.0
            )
            right = tl.load(
                right_at + ranks[:, None] * IN + inputs[None, :],
                mask=(ranks < rank)[:, None] & (inputs < IN)[None, :],
                other=0.0,
            )
            inner = tl.dot(
                right.to(tl.float32), tl.trans(values.to(tl.float32)), acc=inner, input_precision="ieee"
            )
        factors = tl.load(
            left_at + outputs[:, None] * rank + ranks[None, :],
            mask=(outputs < OUT)[:, None] & (ranks < rank)[None, :],
            other=0.0,
        )
        total = tl.dot(factors.to(tl.float32), inner, acc=total, input_precision="ieee")
    return total


@triton.jit
def _whole(address, offsets, mask, dtype):  # type: ignore[no-untyped-def]
    """Load numbers of a whole tensor as float32."""
    if dtype == 0:
        values = tl.load(address.to(tl.pointer_type(tl.float32)) + offsets, mask=mask, other=0.0)
    elif dtype == 1:
        values = tl.load(address.to(tl.pointer_type(tl.bfloat16)) + offsets, mask=mask, other=0.0).to(
            tl.float32
        )
    else:
        values = tl.load(address.to(tl.pointer_type(tl.float16)) + offsets, mask=mask, other=0.0).to(
            tl.float32
        )
    return values


@triton.jit
def _bias(address, outputs, OUT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load a bias of a block of outputs; zeros if there is none."""
    return tl.load(
        address.to(tl.pointer_type(tl.float32)) + outputs, mask=(outputs < OUT) & (address != 0), other=0.0
    )


@triton.jit
def _tile(ranges, num_slots, tile, least, most, ROWS: tl.constexpr, SLOTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a tile's slot, its first position and the one after the slot's last. Surplus tiles have no rows."""
    slots = tl.arange(0, SLOTS)
    first = tl.load(ranges + 2 * slots, mask=slots < num_slots, other=0)
    last = tl.load(ranges + 2 * slots + 1, mask=slots < num_slots, other=0)
    lengths = last - first
    tiles = tl.where((lengths > least) & (lengths <= most), (lengths + ROWS - 1) // ROWS, 0)
    ends = tl.cumsum(tiles, 0)
    slot = tl.sum((ends <= tile).to(tl.int32), 0)
    begin = tl.sum(tl.where(slots == slot, first + (tile - ends + tiles) * ROWS, 0), 0)
    return slot, begin, tl.sum(tl.where(slots == slot, last, 0), 0)


@triton.jit
def _eight_products(  # type: ignore[no-untyped-def]
    total,  # [outputs, rows] float32
    packed,  # [outputs, bytes] uint8
    values,  # [rows, 8 * bytes]
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
    MINUS_ONE: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):
    """Add the products of a tile of signs with the inputs of a tile of rows to `total`."""
    # Split by bit 0 of an input's index, then by bit 1, then by bit 2.
    even, odd = tl.split(tl.reshape(values, [ROWS, BYTES, 2, 2, 2]))
    even_even, even_odd = tl.split(even)
    odd_even, odd_odd = tl.split(odd)
    at_0, at_4 = tl.split(even_even)
    at_2, at_6 = tl.split(even_odd)
    at_1, at_5 = tl.split(odd_even)
    at_3, at_7 = tl.split(odd_odd)
    total = _product(total, packed, at_0, 0, MINUS_ONE, IN_FLOAT32)
    total = _product(total, packed, at_1, 1, MINUS_ONE, IN_FLOAT32)
    total = _product(total, packed, at_2, 2, MINUS_ONE, IN_FLOAT32)
    total = _product(total, packed, at_3, 3, MINUS_ONE, IN_FLOAT32)
    total = _product(total, packed, at_4, 4, MINUS_ONE, IN_FLOAT32)
    total = _product(total, packed, at_5, 5, MINUS_ONE, IN_FLOAT32)
    total = _product(total, packed, at_6, 6, MINUS_ONE, IN_FLOAT32)
    return _product(total, packed, at_7, 7, MINUS_ONE, IN_FLOAT32)


@triton.jit
def _product(  # type: ignore[no-untyped-def]
    total, packed, values, BIT: tl.constexpr, MINUS_ONE: tl.constexpr, IN_FLOAT32: tl.constexpr
):
    """Add the product of the signs at one bit of `packed`, [outputs, bytes], with `values`, [rows, bytes]."""
    if MINUS_ONE > 0xFFFF:
        bits = (packed.to(tl.uint32) << (31 - BIT)) & 0x80000000
    else:
        bits = (packed.to(tl.uint16) << (15 - BIT)) & 0x8000
    signs = (bits ^ MINUS_ONE).to(bits.dtype).to(values.dtype, bitcast=True)
    if IN_FLOAT32:
        signs, values = signs.to(tl.float32), values.to(tl.float32)
    return tl.dot(signs, tl.trans(values), acc=total, input_precision="ieee")


@triton.jit(
    do_not_specialize=["output_stride", "feature_stride", "num_slots", "num_ids"],
    do_not_specialize_on_alignment=["output", "ids", "table", "order", "ranges"],
)
def _add_rows(  # type: ignore[no-untyped-def]
    output,
    output_stride,
    feature_stride,
    ids,
    table,
    order,
    ranges,
    num_slots,
    num_ids,
    scale,
    IN: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Add one block of features of one embedding row. The grid is [positions, blocks of features]."""
    position = tl.program_id(0)
    slots = tl.arange(0, SLOTS)
    first = tl.load(ranges + 2 * slots, mask=slots < num_slots, other=0)
    last = tl.load(ranges + 2 * slots + 1, mask=slots < num_slots, other=0)
    is_own = (first <= position) & (position < last)
    if tl.sum(is_own.to(tl.int32), 0) == 0:
        return
    slot = tl.sum(tl.where(is_own, slots, 0), 0)
    row = tl.load(order + position).to(tl.int64)
    number = tl.load(ids + row)
    # The second part has the rows that the base lacks.
    part = (number >= num_ids).to(tl.int64)
    if (number < 0) | (part >= PARTS):
        return
    own = table + (part * num_slots + slot) * _FIELDS
    number -= part * num_ids
    whole, left, rank = tl.load(own + _WHOLE), tl.load(own + _LEFT), tl.load(own + _RANK).to(tl.int32)
    if (whole != 0) & (number >= tl.load(own + _WHOLE_ROWS)):
        return
    features = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_feature = features < IN
    where = output + row * output_stride + features * feature_stride
    total = tl.load(where, mask=is_feature, other=0.0).to(tl.float32)
    if whole != 0:
        total = _whole(whole, number * IN + features, is_feature, tl.load(own + _WHOLE_DTYPE)) * scale
    for plane in range(_PLANES):
        fields = own + _PLANE_FIELDS * plane
        address = tl.load(fields)
        if address != 0:
            scale_out, scale_in = tl.load(fields + _SCALE_OUT), tl.load(fields + _SCALE_IN)
            factor = tl.load(tl.load(fields + _GAIN).to(tl.pointer_type(tl.float32)))
            is_single = (tl.load(own + _SINGLE) >> plane) & 1
            if scale_out != 0:
                at = scale_out.to(tl.pointer_type(tl.float16)) + number * (1 - is_single)
                factor *= tl.load(at).to(tl.float32)
            signs = address.to(tl.pointer_type(tl.uint8)) + number * ((IN + 7) // 8)
            packed = tl.load(signs + features // 8, mask=is_feature, other=0)
            factors = tl.load(
                scale_in.to(tl.pointer_type(tl.float16)) + features,
                mask=is_feature & (scale_in != 0),
                other=1.0,
            ).to(tl.float32)
            is_plus = (packed.to(tl.int32) >> (features % 8)) & 1 == 1
            total += tl.where(is_plus, factor, -factor) * factors * scale
    if left != 0:
        left_at = left.to(tl.pointer_type(tl.float16)) + number * rank
        right_at = tl.load(own + _RIGHT).to(tl.pointer_type(tl.float16))
        low = tl.zeros([BLOCK], tl.float32)
        for k in range(rank):
            right = tl.load(right_at + k * IN + features, mask=is_feature, other=0.0).to(tl.float32)
            low += tl.load(left_at + k).to(tl.float32) * right
        total += low * scale
    tl.store(where, total.to(output.dtype.element_ty), mask=is_feature)
