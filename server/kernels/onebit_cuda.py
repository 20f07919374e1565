"""The one-bit products on CUDA, in Triton. Launches depend on shapes alone: a step can be captured in a CUDA graph.

A program computes a block of outputs for one tile of a group's rows, over one part of the inputs. Signs stay packed
until they are in registers. The eight signs of a byte are operands of eight products, each with the inputs at the same
bit, so a byte is loaded once and no sign is moved between threads. A sign is shifted into the sign bit of a constant
one: two instructions and no conversion. If the inputs are cut into parts, the last program to finish adds the partial
sums in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

# Batches of at most this many rows take one launch. Larger ones take two: one for short groups, one for long groups.
SMALL_BATCH = 64
# Rows of a short group, at most.
SHORT_GROUP = 32
# Groups that kernels are compiled for. A batch with more groups compiles them again.
GROUPS = 64
# Programs for the parts of one group, about two per multiprocessor of the largest devices.
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

    rows: int  # of a group per program; tensor cores need 16 at least
    outputs: int  # per program
    num_bytes: int  # of each output's signs per iteration of a program's loop
    num_warps: int
    num_stages: int  # of Triton's software pipeline of loads


DECODE = Tiling(rows=16, outputs=64, num_bytes=32, num_warps=4, num_stages=4)
PREFILL = Tiling(rows=128, outputs=128, num_bytes=16, num_warps=8, num_stages=3)


def add_onebit_matmul(
    output: Tensor,  # [rows, out], any float dtype, changed in place
    x: Tensor,  # [rows, in], any float dtype
    plane_ptrs: Tensor,  # [groups, 3] int64; addresses of signs are multiples of 16, as they are in slots
    ranges: Tensor,  # [groups, 2] int32
) -> None:
    """Compute `server.kernels.add_onebit_matmul`, with scaled inputs rounded to their dtype for the tensor cores."""
    if x.stride(1) != 1 or x.dtype not in MINUS_ONE:
        x = x.to(x.dtype if x.dtype in MINUS_ONE else torch.float32).contiguous()
    if len(x) <= SMALL_BATCH:
        _launch(output, x, plane_ptrs, ranges, DECODE, (0, len(x)))
    else:
        _launch(output, x, plane_ptrs, ranges, DECODE, (0, SHORT_GROUP))
        _launch(output, x, plane_ptrs, ranges, PREFILL, (SHORT_GROUP, len(x)))


def add_onebit_rows(
    output: Tensor,  # [rows, in], any float dtype, changed in place
    ids: Tensor,  # [rows] int64
    plane_ptrs: Tensor,  # [groups, 3] int64
    ranges: Tensor,  # [groups, 2] int32
    num_ids: int,
    scale: float,
) -> None:
    """Compute `server.kernels.add_onebit_rows`."""
    num_rows, in_features = output.shape
    _add_rows[(num_rows, triton.cdiv(in_features, FEATURES))](
        *(output, *output.stride(), ids.contiguous(), plane_ptrs, ranges, len(plane_ptrs), scale),
        IN=in_features,
        BLOCK=FEATURES,
        GROUPS=_num_groups(plane_ptrs),
    )


def prepare(device: torch.device, shapes: set[tuple[int, int]], dtype: torch.dtype) -> None:
    """Compile everything that requests need.

    The number of rows, and that of groups up to GROUPS, do not change the compiled code.

    Args:
        device: the CUDA device.
        shapes: out and in of the matrices that deltas change.
        dtype: of the model.
    """
    plane_ptrs = torch.zeros(1, 3, dtype=torch.int64, device=device)
    ranges = torch.zeros(1, 2, dtype=torch.int32, device=device)
    for out_features, in_features in sorted(shapes):
        for num_rows in (1, SMALL_BATCH + 1):
            x = torch.zeros(num_rows, in_features, dtype=dtype, device=device)
            # Layers whose deltas have more than one plane sum in float32.
            for output_dtype in {dtype, torch.float32}:
                output = torch.zeros(num_rows, out_features, dtype=output_dtype, device=device)
                add_onebit_matmul(output, x, plane_ptrs, ranges)
        ids = torch.zeros(1, dtype=torch.int64, device=device)
        for output_dtype in {dtype, torch.float32}:
            rows = torch.zeros(1, in_features, dtype=output_dtype, device=device)
            add_onebit_rows(rows, ids, plane_ptrs, ranges, out_features, 1.0)


def _launch(
    output: Tensor, x: Tensor, plane_ptrs: Tensor, ranges: Tensor, tiling: Tiling, lengths: tuple[int, int]
) -> None:
    """Launch the product for the groups whose number of rows is above the first of `lengths` and at most the second.

    Raises:
        RuntimeError: the batch has more tiles than there are counters.
    """
    (num_rows, out_features), in_features, num_groups = output.shape, x.shape[1], len(plane_ptrs)
    least, most = lengths
    # An upper bound on the tiles of rows, whatever the sizes of the groups are.
    num_tiles = min(num_rows // tiling.rows + num_groups, num_groups * triton.cdiv(most, tiling.rows))
    num_blocks = triton.cdiv(out_features, tiling.outputs)
    num_parts = 1
    if tiling is DECODE:
        # Depends on the layer's shape alone, so that a row's sum does not depend on the rest of the batch.
        num_parts = max(1, min(PROGRAMS // num_blocks, in_features // 8 // MIN_PART))
    size = num_tiles * num_blocks * num_parts * tiling.outputs * tiling.rows if num_parts > 1 else 1
    if num_parts > 1 and num_tiles * num_blocks > MAX_COUNTERS:
        raise RuntimeError(
            f"{num_groups} deltas in a batch of {num_rows} rows are too many for one step: lower --max-gpu-deltas"
        )
    _add_product[(num_blocks, num_parts, num_tiles)](
        *(output, *output.stride(), x, x.stride(0), plane_ptrs, ranges, num_groups, least, most),
        torch.empty(size, dtype=torch.float32, device=x.device),
        _counters(x.device),
        OUT=out_features,
        IN=in_features,
        PARTS=num_parts,
        ROWS=tiling.rows,
        OUTPUTS=tiling.outputs,
        BYTES=tiling.num_bytes,
        GROUPS=_num_groups(plane_ptrs),
        MINUS_ONE=MINUS_ONE[x.dtype],
        IN_FLOAT32=x.dtype == torch.bfloat16 and _is_interpreted(),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


def _num_groups(plane_ptrs: Tensor) -> int:
    return max(GROUPS, int(triton.next_power_of_2(len(plane_ptrs))))


@cache
def _counters(device: torch.device) -> Tensor:
    """Return the counters of finished parts per block. Kernels leave zeros; only one stream may use them at a time."""
    return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)


def _is_interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels; it multiplies bfloat16 as if it were integers."""
    return bool(triton.knobs.runtime.interpret)


# Only arguments that are constant for a layer may be specialised on, so that no request compiles anything.
@triton.jit(
    do_not_specialize=["output_stride", "feature_stride", "num_groups", "least", "most"],
    do_not_specialize_on_alignment=["output", "plane_ptrs", "ranges", "partial"],
)
def _add_product(  # type: ignore[no-untyped-def]
    output,
    output_stride,
    feature_stride,
    x,
    x_stride,
    plane_ptrs,
    ranges,
    num_groups,
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
    GROUPS: tl.constexpr,
    MINUS_ONE: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):
    """Add one block of outputs of one tile of rows. The grid is [blocks of outputs, parts of inputs, tiles of rows]."""
    group, begin, stop = _tile(ranges, num_groups, tl.program_id(2), least, most, ROWS, GROUPS)
    if begin >= stop:
        return
    address = tl.load(plane_ptrs + 3 * group)
    if address == 0:
        return
    signs = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)
    factor_in = tl.load(plane_ptrs + 3 * group + 2)
    WIDTH: tl.constexpr = (IN + 7) // 8
    SHARE: tl.constexpr = ((WIDTH + PARTS - 1) // PARTS + BYTES - 1) // BYTES * BYTES
    block, part = tl.program_id(0), tl.program_id(1)
    outputs = block * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = begin + tl.arange(0, ROWS)
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for first in range(part * SHARE, tl.minimum(part * SHARE + SHARE, WIDTH), BYTES):
        own = first + tl.arange(0, BYTES)
        packed = tl.load(
            signs + outputs.to(tl.int64)[:, None] * WIDTH + own[None, :],
            mask=(outputs < OUT)[:, None] & (own < WIDTH)[None, :],
            other=0,
        )
        inputs = 8 * first + tl.arange(0, 8 * BYTES)
        values = tl.load(
            x + rows.to(tl.int64)[:, None] * x_stride + inputs[None, :],
            mask=(rows < stop)[:, None] & (inputs < IN)[None, :],
            other=0.0,
        )
        factors = tl.load(
            factor_in.to(tl.pointer_type(tl.float32)) + inputs,
            mask=(inputs < IN) & (factor_in != 0),
            other=1.0,
        )
        scaled = (values.to(tl.float32) * factors[None, :]).to(values.dtype)
        total = _eight_products(total, packed, scaled, ROWS, BYTES, MINUS_ONE, IN_FLOAT32)

    if PARTS > 1:
        first_part = (tl.program_id(2) * tl.num_programs(0) + block) * PARTS
        cells = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        sums = partial + first_part.to(tl.int64) * (OUTPUTS * ROWS) + cells
        is_row = (rows < stop)[None, :] & (outputs >= 0)[:, None]
        tl.store(sums + part * (OUTPUTS * ROWS), total, mask=is_row)
        # All threads of the program must have written before the part counts as finished.
        tl.debug_barrier()
        if tl.atomic_add(counters + first_part // PARTS, 1, sem="acq_rel") < PARTS - 1:
            return
        total = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for number in range(PARTS):
            total += tl.load(sums + number * (OUTPUTS * ROWS), mask=is_row, other=0.0, cache_modifier=".cg")
        tl.store(counters + first_part // PARTS, 0)

    factor_out = tl.load(plane_ptrs + 3 * group + 1).to(tl.pointer_type(tl.float32))
    factors_out = tl.load(factor_out + outputs, mask=outputs < OUT, other=0.0)
    where = (
        output + rows.to(tl.int64)[None, :] * output_stride + outputs.to(tl.int64)[:, None] * feature_stride
    )
    is_own = (outputs < OUT)[:, None] & (rows < stop)[None, :]
    before = tl.load(where, mask=is_own, other=0.0).to(tl.float32)
    tl.store(where, (before + total * factors_out[:, None]).to(output.dtype.element_ty), mask=is_own)


@triton.jit
def _tile(ranges, num_groups, tile, least, most, ROWS: tl.constexpr, GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a tile's group, its first row and the row after the group's last. Surplus tiles have no rows."""
    groups = tl.arange(0, GROUPS)
    first = tl.load(ranges + 2 * groups, mask=groups < num_groups, other=0)
    last = tl.load(ranges + 2 * groups + 1, mask=groups < num_groups, other=0)
    lengths = last - first
    tiles = tl.where((lengths > least) & (lengths <= most), (lengths + ROWS - 1) // ROWS, 0)
    ends = tl.cumsum(tiles, 0)
    group = tl.sum((ends <= tile).to(tl.int32), 0)
    begin = tl.sum(tl.where(groups == group, first + (tile - ends + tiles) * ROWS, 0), 0)
    return group, begin, tl.sum(tl.where(groups == group, last, 0), 0)


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
    do_not_specialize=["output_stride", "feature_stride", "num_groups"],
    do_not_specialize_on_alignment=["output", "ids", "plane_ptrs", "ranges"],
)
def _add_rows(  # type: ignore[no-untyped-def]
    output,
    output_stride,
    feature_stride,
    ids,
    plane_ptrs,
    ranges,
    num_groups,
    scale,
    IN: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Add one block of features of one embedding row. The grid is [rows, blocks of features]."""
    row = tl.program_id(0)
    groups = tl.arange(0, GROUPS)
    first = tl.load(ranges + 2 * groups, mask=groups < num_groups, other=0)
    last = tl.load(ranges + 2 * groups + 1, mask=groups < num_groups, other=0)
    is_own = (first <= row) & (row < last)
    if tl.sum(is_own.to(tl.int32), 0) == 0:
        return
    group = tl.sum(tl.where(is_own, groups, 0), 0)
    address = tl.load(plane_ptrs + 3 * group)
    if address == 0:
        return
    number = tl.load(ids + row)
    factor_out = tl.load(tl.load(plane_ptrs + 3 * group + 1).to(tl.pointer_type(tl.float32)) + number)
    factor_in = tl.load(plane_ptrs + 3 * group + 2)
    features = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    signs = address.to(tl.pointer_type(tl.uint8)) + number * ((IN + 7) // 8)
    packed = tl.load(signs + features // 8, mask=features < IN, other=0)
    factors = tl.load(
        factor_in.to(tl.pointer_type(tl.float32)) + features,
        mask=(features < IN) & (factor_in != 0),
        other=1.0,
    )
    delta = tl.where((packed.to(tl.int32) >> (features % 8)) & 1 == 1, factor_out, -factor_out) * factors
    where = output + row.to(tl.int64) * output_stride + features * feature_stride
    before = tl.load(where, mask=features < IN, other=0.0).to(tl.float32)
    tl.store(where, (before + delta * scale).to(output.dtype.element_ty), mask=features < IN)
