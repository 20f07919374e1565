"""The products of deltas on CUDA, in Triton. Launches depend on shapes alone: a step can be captured in a CUDA graph.

One kernel writes each plane's inputs times `scale_in`, sorted by slot and by their bit in a byte of signs. A program of
the next one computes a block of outputs for one tile of a slot's rows, over one share of the inputs. Signs stay packed
until they are in registers. The eight signs of a byte are operands of eight products, each with the inputs at the same
bit, so a byte is loaded once and no sign is moved between threads. If the inputs are cut into shares, the last program
to finish adds the partial sums in a fixed order.

In bfloat16 the operand is the byte under the mask of one bit, read as a number: 2^(bit - 133) or 0. The inputs at that
bit were multiplied by 2^(60 - bit), both exactly, so that ``B @ x = 2^74 * product - sum(x)``: one instruction for two
signs. In other dtypes a sign is shifted into the sign bit of a constant one, which takes two for each.
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
# Programs for the shares of one slot, about two per multiprocessor of the largest devices.
PROGRAMS = 256
# Bytes of a row of signs in a share, at least: adding up shorter shares costs more than they gain. One program scales
# the inputs of so many.
CHUNK = 128
# Positions whose inputs are scaled at a time. Bounds the memory for them.
POSITIONS = 1024
# Features of an embedding row per program.
FEATURES = 1024
MAX_COUNTERS = 1 << 16
# The bits of -1 in each dtype.
MINUS_ONE = {torch.bfloat16: 0xBF80, torch.float16: 0xBC00, torch.float32: 0xBF800000}


@dataclass(frozen=True, slots=True)
class Tiling:
    """The block sizes of a product, the fastest of those tried on an H200."""

    rows: int  # of a slot per program; tensor cores need 8 at least
    outputs: int  # per program
    num_bytes: int  # of each output's signs per iteration of a program's loop
    num_warps: int
    num_stages: int  # of Triton's software pipeline of loads
    max_registers: int | None  # of a thread; the terms that are seldom there may spill
    cuts_inputs: bool  # into shares of several programs

    def stages(self, dtype: torch.dtype) -> int:
        """Return `num_stages`, or what the shared memory of sm_86 and sm_89 holds of inputs in float32."""
        return 2 if dtype == torch.float32 else self.num_stages


DECODE = Tiling(
    rows=8, outputs=64, num_bytes=64, num_warps=2, num_stages=3, max_registers=128, cuts_inputs=True
)
PREFILL = Tiling(
    rows=64, outputs=128, num_bytes=32, num_warps=4, num_stages=3, max_registers=None, cuts_inputs=False
)


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
    for first in range(0, len(x), POSITIONS):
        _add_planes(output, x, table, order, ranges, tuple(ends), first)


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


def _add_planes(
    output: Tensor,
    x: Tensor,
    table: Tensor,
    order: Tensor,
    ranges: Tensor,
    ends: tuple[int, ...],
    start: int,
) -> None:
    """Add the products of the rows at up to POSITIONS positions of `order` from `start` on.

    Raises:
        RuntimeError: the batch has more tiles than there are counters.
    """
    (num_parts, num_slots, _), in_features = table.shape, x.shape[1]
    num_positions, num_chunks = min(POSITIONS, len(x) - start), triton.cdiv(in_features, 8 * CHUNK)
    planes = num_parts, MAX_PLANES
    scaled = torch.empty(*planes, 8, num_positions, CHUNK * num_chunks, dtype=x.dtype, device=x.device)
    sums = torch.empty(*planes, num_positions, num_chunks, dtype=torch.float32, device=x.device)
    rows = table, order, ranges, num_slots, start, num_positions
    constants = {
        "IN": in_features,
        "SLOTS": _num_slots(num_slots),
        "CHUNK": CHUNK,
        "AS_BITS": x.dtype == torch.bfloat16,
    }
    _scale_inputs[(num_positions, num_parts, num_chunks)](scaled, sums, x, x.stride(0), *rows, **constants)
    short = min(num_positions, SMALL_BATCH if len(x) <= SMALL_BATCH else SHORT_GROUP)
    for tiling, least, most in ((DECODE, 0, short), (PREFILL, short, num_positions)):
        if least == most:
            continue
        # An upper bound on the tiles of rows, however the rows are divided among the slots.
        num_tiles = min(
            num_positions,
            num_positions // tiling.rows + num_slots,
            num_slots * triton.cdiv(most, tiling.rows),
        )
        blocks = _blocks(ends, tiling.outputs, x.device)
        num_shares = 1
        if tiling.cuts_inputs:
            # Depends on the layer's shape alone, so that a row's sum does not depend on the rest of the batch.
            num_shares = max(1, min(PROGRAMS // len(blocks), in_features // 8 // CHUNK))
        size = num_tiles * len(blocks) * num_shares * tiling.outputs * tiling.rows if num_shares > 1 else 1
        if num_shares > 1 and num_tiles * len(blocks) > MAX_COUNTERS:
            raise RuntimeError(
                f"{num_slots} deltas in a batch of {len(x)} rows are too many for one step: lower --max-gpu-deltas"
            )
        _add_product[(len(blocks), num_shares, num_tiles)](
            *(output, *output.stride(), x, x.stride(0), scaled, sums, blocks, *rows, least, most),
            torch.empty(size, dtype=torch.float32, device=x.device),
            _counters(x.device),
            SHARES=num_shares,
            ROWS=tiling.rows,
            OUTPUTS=tiling.outputs,
            BYTES=tiling.num_bytes,
            MINUS_ONE=MINUS_ONE[x.dtype],
            IN_FLOAT32=x.dtype == torch.bfloat16 and _is_interpreted(),
            num_warps=tiling.num_warps,
            num_stages=tiling.stages(x.dtype),
            maxnreg=tiling.max_registers,
            **constants,
        )


@cache
def _blocks(ends: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """Divide the outputs of all parts into blocks that cross no part.

    Returns:
        [blocks, 4] int32: the part, its first column in the output, its number of outputs, and the block's first.
    """
    starts = (0, *ends[:-1])
    rows = [
        (part, start, end - start, first)
        for part, (start, end) in enumerate(zip(starts, ends, strict=True))
        for first in range(0, end - start, size)
    ]
    return torch.tensor(rows, dtype=torch.int32).to(device)


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
# Four bytes become bfloat16 numbers, 0 but for one bit.
_BITS = tl.constexpr(
    tuple(
        "{ .reg .b32 low, high; prmt.b32 low, $2, 0, 0x4140; prmt.b32 high, $2, 0, 0x4342;"
        f" and.b32 $0, low, {0x10001 << bit}; and.b32 $1, high, {0x10001 << bit}; }}"
        for bit in range(8)
    )
)
_INPUTS = tl.constexpr(32)  # of a low-rank part or whole tensor at a time: they are products of float32


# Only arguments that are constant for a layer may be specialised on, so that no request compiles anything.
@triton.jit(
    do_not_specialize=["num_slots", "start", "num_positions"],
    do_not_specialize_on_alignment=["table", "order", "ranges"],
)
def _scale_inputs(  # type: ignore[no-untyped-def]
    scaled,  # [parts, planes, 8, positions, CHUNK * chunks], of the dtype of x
    sums,  # [parts, planes, positions, chunks] float32
    x,
    x_stride,
    table,
    order,
    ranges,
    num_slots,
    start,
    num_positions,
    IN: tl.constexpr,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
    AS_BITS: tl.constexpr,
):
    """Write inputs times each plane's `scale_in`, by their bit in a byte of signs.

    The grid is [positions, parts, chunks].
    """
    position, part, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = _slot(ranges, num_slots, start + position, SLOTS)
    if slot < 0:
        return
    WIDTH: tl.constexpr = (IN + 8 * CHUNK - 1) // (8 * CHUNK) * CHUNK
    own = table + (part * num_slots + slot).to(tl.int64) * _FIELDS
    row = tl.load(order + start + position).to(tl.int64)
    inputs = 8 * CHUNK * chunk + tl.arange(0, 8 * CHUNK)
    values = tl.load(x + row * x_stride + inputs, mask=inputs < IN, other=0.0)
    for plane in range(_num_planes(own)):
        scale_in = tl.load(own + _PLANE_FIELDS * plane + _SCALE_IN)
        factors = tl.load(
            scale_in.to(tl.pointer_type(tl.float16)) + inputs,
            mask=(inputs < IN) & (scale_in != 0),
            other=1.0,
        )
        product = (values.to(tl.float32) * factors.to(tl.float32)).to(values.dtype).to(tl.float32)
        of_plane = (part * _PLANES + plane).to(tl.int64)
        at = (of_plane * num_positions + position) * tl.num_programs(2) + chunk
        tl.store(sums + at, tl.sum(product, 0))
        if AS_BITS:
            product *= tl.exp2((60 - inputs % 8).to(tl.float32))
        at = (8 * of_plane + inputs % 8) * num_positions + position
        tl.store(scaled + at * WIDTH + inputs // 8, product.to(values.dtype))


@triton.jit(
    do_not_specialize=[
        "output_stride",
        "feature_stride",
        "num_slots",
        "start",
        "num_positions",
        "least",
        "most",
    ],
    do_not_specialize_on_alignment=["output", "blocks", "table", "order", "ranges", "partial"],
)
def _add_product(  # type: ignore[no-untyped-def]
    output,
    output_stride,
    feature_stride,
    x,
    x_stride,
    scaled,  # by `_scale_inputs`
    sums,  # by `_scale_inputs`
    blocks,  # [blocks, 4]
    table,
    order,
    ranges,
    num_slots,
    start,
    num_positions,
    least,
    most,
    partial,  # [tiles, blocks, SHARES, OUTPUTS, ROWS] float32 if SHARES > 1
    counters,
    IN: tl.constexpr,
    SHARES: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BYTES: tl.constexpr,
    CHUNK: tl.constexpr,
    SLOTS: tl.constexpr,
    MINUS_ONE: tl.constexpr,
    AS_BITS: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):
    """Add one block of outputs of one tile of rows.

    The grid is [blocks of outputs, shares of inputs, tiles of rows].
    """
    block, share, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot, begin, stop = _tile(ranges, num_slots, tile, start, num_positions, least, most, ROWS, SLOTS)
    if begin >= stop:
        return
    part, column = tl.load(blocks + 4 * block), tl.load(blocks + 4 * block + 1)
    out_features = tl.load(blocks + 4 * block + 2)
    own = table + (part * num_slots + slot).to(tl.int64) * _FIELDS
    whole, left, bias = tl.load(own + _WHOLE), tl.load(own + _LEFT), tl.load(own + _BIAS)
    num_planes = _num_planes(own)
    if (num_planes == 0) & (whole == 0) & (left == 0) & (bias == 0):
        return
    WIDTH: tl.constexpr = (IN + 7) // 8
    NUM_CHUNKS: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK
    SHARE: tl.constexpr = (NUM_CHUNKS + SHARES - 1) // SHARES * CHUNK
    first_byte, last_byte = share * SHARE, tl.minimum(share * SHARE + SHARE, WIDTH)
    outputs = tl.load(blocks + 4 * block + 3) + tl.arange(0, OUTPUTS)
    is_output = outputs < out_features
    num_outputs = out_features
    if whole != 0:
        num_outputs = tl.minimum(out_features, tl.load(own + _WHOLE_ROWS).to(tl.int32))
    positions = begin + tl.arange(0, ROWS)
    is_row = positions < stop
    rows = x + tl.load(order + positions, mask=is_row, other=0).to(tl.int64) * x_stride
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for plane in range(num_planes):
        fields = own + _PLANE_FIELDS * plane
        signs = tl.multiple_of(tl.load(fields).to(tl.pointer_type(tl.uint8)), 16)
        scale_out, is_single = tl.load(fields + _SCALE_OUT), (tl.load(own + _SINGLE) >> plane) & 1
        factors_out = tl.load(
            scale_out.to(tl.pointer_type(tl.float16)) + outputs * (1 - is_single),
            mask=is_output & (scale_out != 0),
            other=1.0,
        ).to(tl.float32)
        factors_out *= tl.load(tl.load(fields + _GAIN).to(tl.pointer_type(tl.float32)))
        product = tl.zeros([OUTPUTS, ROWS], tl.float32)
        of_plane = (part * _PLANES + plane).to(tl.int64)
        own_rows = scaled + (8 * of_plane * num_positions + positions - start) * (NUM_CHUNKS * CHUNK)
        of_bit = num_positions.to(tl.int64) * (NUM_CHUNKS * CHUNK)
        for first in range(first_byte, last_byte, BYTES):
            own_bytes = first + tl.arange(0, BYTES)
            packed = tl.load(
                signs + outputs.to(tl.int64)[:, None] * WIDTH + own_bytes[None, :],
                mask=is_output[:, None] & (own_bytes < WIDTH)[None, :],
                other=0,
            )
            at = own_rows[:, None] + own_bytes[None, :]
            for bit in tl.static_range(8):
                values = tl.load(at + bit * of_bit, mask=is_row[:, None], other=0.0)
                product = _add_bit(product, packed, values, bit, AS_BITS, MINUS_ONE, IN_FLOAT32)
        if AS_BITS:
            chunks = tl.arange(0, triton.next_power_of_2(NUM_CHUNKS))
            is_own = (chunks * CHUNK >= first_byte) & (chunks * CHUNK < last_byte)
            of_rows = tl.load(
                sums + (of_plane * num_positions + positions - start)[None, :] * NUM_CHUNKS + chunks[:, None],
                mask=is_own[:, None] & is_row[None, :],
                other=0.0,
            )
            product = product * 2.0**74 - tl.sum(of_rows, 0)[None, :]
        total += product * factors_out[:, None]
    first_input, last_input = 8 * first_byte, tl.minimum(8 * last_byte, IN)
    if left != 0:
        total = _add_low_rank(
            total, own, left, rows, is_row, outputs, is_output, first_input, last_input, IN, ROWS
        )
    if whole != 0:
        for first in range(first_input, last_input, _INPUTS):
            inputs = first + tl.arange(0, _INPUTS)
            is_input = inputs < IN
            values = tl.load(
                rows[:, None] + inputs[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0
            )
            weights = _whole(
                whole,
                outputs.to(tl.int64)[:, None] * IN + inputs[None, :],
                (outputs < num_outputs)[:, None] & is_input[None, :],
                tl.load(own + _WHOLE_DTYPE),
            )
            total = tl.dot(weights, tl.trans(values.to(tl.float32)), acc=total, input_precision="ieee")

    if SHARES > 1:
        first_share = (tile * tl.num_programs(0) + block) * SHARES
        cells = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        sums_of_shares = partial + first_share.to(tl.int64) * (OUTPUTS * ROWS) + cells
        is_cell = is_row[None, :] & (outputs >= 0)[:, None]
        tl.store(sums_of_shares + share * (OUTPUTS * ROWS), total, mask=is_cell)
        # All threads of the program must have written before the share counts as finished.
        tl.debug_barrier()
        if tl.atomic_add(counters + first_share // SHARES, 1, sem="acq_rel") < SHARES - 1:
            return
        total = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for number in range(SHARES):
            total += tl.load(
                sums_of_shares + number * (OUTPUTS * ROWS), mask=is_cell, other=0.0, cache_modifier=".cg"
            )
        tl.store(counters + first_share // SHARES, 0)

    base_bias = tl.load(own + _BASE_BIAS)
    if (bias != 0) | ((whole != 0) & (base_bias != 0)):
        added = _bias(bias, outputs, is_output)
        if (whole == 0) | (bias == 0):
            added -= _bias(base_bias, outputs, is_output)
        if bias == 0:
            added = -added
        total += added[:, None]
    number = tl.load(order + positions, mask=is_row, other=0).to(tl.int64)
    columns = (column + outputs).to(tl.int64) * feature_stride
    where = output + number[None, :] * output_stride + columns[:, None]
    is_own = (outputs < num_outputs)[:, None] & is_row[None, :]
    old = tl.load(where, mask=is_own & (whole == 0), other=0.0).to(tl.float32)
    tl.store(where, (old + total).to(output.dtype.element_ty), mask=is_own)


@triton.jit
def _add_low_rank(  # type: ignore[no-untyped-def]
    total,  # [OUTPUTS, ROWS] float32
    own,
    left,
    rows,
    is_row,
    outputs,
    is_output,
    first_input,
    last_input,
    IN: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add the low-rank part's product with the inputs of a share; it is linear in them."""
    rank = tl.load(own + _RANK).to(tl.int32)
    left_at = left.to(tl.pointer_type(tl.float16))
    right_at = tl.load(own + _RIGHT).to(tl.pointer_type(tl.float16))
    for first_rank in range(0, rank, _RANKS):
        ranks = first_rank + tl.arange(0, _RANKS)
        inner = tl.zeros([_RANKS, ROWS], tl.float32)
        for first in range(first_input, last_input, _INPUTS):
            inputs = first + tl.arange(0, _INPUTS)
            is_input = inputs < IN
            values = tl.load(
                rows[:, None] + inputs[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0
            )
            right = tl.load(
                right_at + ranks[:, None] * IN + inputs[None, :],
                mask=(ranks < rank)[:, None] & is_input[None, :],
                other=0.0,
            )
            inner = tl.dot(
                right.to(tl.float32), tl.trans(values.to(tl.float32)), acc=inner, input_precision="ieee"
            )
        factors = tl.load(
            left_at + outputs[:, None] * rank + ranks[None, :],
            mask=is_output[:, None] & (ranks < rank)[None, :],
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
def _bias(address, outputs, is_output):  # type: ignore[no-untyped-def]
    """Load a bias of a block of outputs; zeros if there is none."""
    return tl.load(
        address.to(tl.pointer_type(tl.float32)) + outputs, mask=is_output & (address != 0), other=0.0
    )


@triton.jit
def _num_planes(own):  # type: ignore[no-untyped-def]
    """Return how many planes a row of a table has; they are its first ones."""
    return tl.sum((tl.load(own + _PLANE_FIELDS * tl.arange(0, _PLANES)) != 0).to(tl.int32), 0)


@triton.jit
def _slot(ranges, num_slots, position, SLOTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the slot of a position; -1 if it belongs to none."""
    slots = tl.arange(0, SLOTS)
    first = tl.load(ranges + 2 * slots, mask=slots < num_slots, other=0)
    last = tl.load(ranges + 2 * slots + 1, mask=slots < num_slots, other=0)
    return tl.max(tl.where((first <= position) & (position < last), slots, -1), 0)


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    ranges, num_slots, tile, start, num_positions, least, most, ROWS: tl.constexpr, SLOTS: tl.constexpr
):
    """Return a tile's slot, its first position and the one after the slot's last. Surplus tiles have no rows."""
    slots = tl.arange(0, SLOTS)
    first = tl.load(ranges + 2 * slots, mask=slots < num_slots, other=0)
    last = tl.load(ranges + 2 * slots + 1, mask=slots < num_slots, other=0)
    first, last = tl.maximum(first, start), tl.minimum(last, start + num_positions)
    lengths = last - first
    tiles = tl.where((lengths > least) & (lengths <= most), (lengths + ROWS - 1) // ROWS, 0)
    ends = tl.cumsum(tiles, 0)
    slot = tl.sum((ends <= tile).to(tl.int32), 0)
    begin = tl.sum(tl.where(slots == slot, first + (tile - ends + tiles) * ROWS, 0), 0)
    return slot, begin, tl.sum(tl.where(slots == slot, last, 0), 0)


@triton.jit
def _add_bit(  # type: ignore[no-untyped-def]
    total,
    packed,
    values,
    BIT: tl.constexpr,
    AS_BITS: tl.constexpr,
    MINUS_ONE: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):
    """Add the product of the signs at one bit of `packed`, [outputs, bytes], with `values`, [rows, bytes]."""
    if AS_BITS and not IN_FLOAT32:
        signs = tl.inline_asm_elementwise(
            _BITS[BIT], "=r,=r,r", [packed], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        if AS_BITS:
            bits = packed.to(tl.uint32) << 16 & (0x10000 << BIT)
        elif MINUS_ONE > 0xFFFF:
            bits = ((packed.to(tl.uint32) << (31 - BIT)) & 0x80000000) ^ MINUS_ONE
        else:
            bits = ((packed.to(tl.uint16) << (15 - BIT)) & 0x8000) ^ MINUS_ONE
        if IN_FLOAT32:
            values = values.to(tl.float32)
        signs = bits.to(values.dtype, bitcast=True)
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
    slot = _slot(ranges, num_slots, position, SLOTS)
    if slot < 0:
        return
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
