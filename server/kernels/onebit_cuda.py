"""The products on CUDA, in Triton. What a layer launches depends on shapes alone, so a step can be a CUDA graph.

A program takes some outputs of one group's tile of rows, and a part of the inputs. Signs stay packed until they are in
registers: the eight signs of a byte are operands of eight products, each with the inputs that stand at the same bit, so
that a byte is loaded once and nothing is rearranged. A sign is put into the sign bit of a one: two instructions and no
conversion. Where inputs are in parts, the program that ends last adds the parts in their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

FEW_ROWS = 64  # of a batch: one launch for all groups; larger batches have one for short groups and one for long ones
SHORT = 32  # rows of a group that still goes with the short ones
GROUPS = 64  # that kernels are compiled for; batches of more have them compiled anew
PROGRAMS = 256  # that a group's parts make up, about two per multiprocessor of the largest devices
LEAST_PART = 128  # bytes of a row of signs: shorter parts would cost more to add than they gain
FEATURES = 1024  # of an embedding row that a program takes
MAX_COUNTERS = 1 << 16
MINUS_ONE = {torch.bfloat16: 0xBF80, torch.float16: 0xBC00, torch.float32: 0xBF800000}


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut up. Chosen by arithmetic for Hopper."""

    rows: int  # of a group that a program takes; at least 16, what tensor cores multiply
    outputs: int
    num_bytes: int  # of each output's signs that a turn of a program's loop takes
    num_warps: int
    num_stages: int  # of loads under way


DECODE = Tiling(rows=16, outputs=64, num_bytes=32, num_warps=4, num_stages=4)
PREFILL = Tiling(rows=128, outputs=128, num_bytes=16, num_warps=8, num_stages=3)


def add_onebit_matmul(
    output: Tensor,  # [rows, out], any float dtype, changed in place
    x: Tensor,  # [rows, in], any float dtype
    plane_ptrs: Tensor,  # [groups, 3] int64; addresses of signs are multiples of 16, as they are in slots
    ranges: Tensor,  # [groups, 2] int32
) -> None:
    """As `server.kernels.add_onebit_matmul`. Scaled inputs are rounded to their dtype, as tensor cores take them."""
    if x.stride(1) != 1 or x.dtype not in MINUS_ONE:
        x = x.to(x.dtype if x.dtype in MINUS_ONE else torch.float32).contiguous()
    if len(x) <= FEW_ROWS:
        _launch(output, x, plane_ptrs, ranges, DECODE, (0, len(x)))
    else:
        _launch(output, x, plane_ptrs, ranges, DECODE, (0, SHORT))
        _launch(output, x, plane_ptrs, ranges, PREFILL, (SHORT, len(x)))


def add_onebit_rows(
    output: Tensor,  # [rows, in], any float dtype, changed in place
    ids: Tensor,  # [rows] int64
    plane_ptrs: Tensor,  # [groups, 3] int64
    ranges: Tensor,  # [groups, 2] int32
    num_ids: int,
    scale: float,
) -> None:
    """As `server.kernels.add_onebit_rows`."""
    num_rows, in_features = output.shape
    _add_rows[(num_rows, triton.cdiv(in_features, FEATURES))](
        *(output, *output.stride(), ids.contiguous(), plane_ptrs, ranges, len(plane_ptrs), scale),
        IN=in_features,
        BLOCK=FEATURES,
        GROUPS=_num_groups(plane_ptrs),
    )


def prepare(device: torch.device, shapes: set[tuple[int, int]], dtype: torch.dtype) -> None:
    """Compile the products with matrices of some shapes, out and in, and their rows: all that requests ask for.

    How many rows a batch has changes no code, nor how many groups up to GROUPS.
    """
    plane_ptrs = torch.zeros(1, 3, dtype=torch.int64, device=device)
    ranges = torch.zeros(1, 2, dtype=torch.int32, device=device)
    for out_features, in_features in sorted(shapes):
        for num_rows in (1, FEW_ROWS + 1):
            x = torch.zeros(num_rows, in_features, dtype=dtype, device=device)
            for output_dtype in {
                dtype,
                torch.float32,
            }:  # layers that are given more than a plane sum in float32
                output = torch.zeros(num_rows, out_features, dtype=output_dtype, device=device)
                add_onebit_matmul(output, x, plane_ptrs, ranges)
        ids = torch.zeros(1, dtype=torch.int64, device=device)
        for output_dtype in {dtype, torch.float32}:
            rows = torch.zeros(1, in_features, dtype=output_dtype, device=device)
            add_onebit_rows(rows, ids, plane_ptrs, ranges, out_features, 1.0)


def _launch(
    output: Tensor, x: Tensor, plane_ptrs: Tensor, ranges: Tensor, tiling: Tiling, lengths: tuple[int, int]
) -> None:
    """One launch for the groups of more rows than `lengths` begins with, up to what it ends with."""
    (num_rows, out_features), in_features, num_groups = output.shape, x.shape[1], len(plane_ptrs)
    least, most = lengths
    # As many tiles of rows as the groups could need, however the rows are shared between them.
    num_tiles = min(num_rows // tiling.rows + num_groups, num_groups * triton.cdiv(most, tiling.rows))
    num_blocks = triton.cdiv(out_features, tiling.outputs)
    num_parts = 1
    if tiling is DECODE:  # of the layer's shape alone, so that a row's sum does not depend on its batch mates
        num_parts = max(1, min(PROGRAMS // num_blocks, in_features // 8 // LEAST_PART))
    size = num_tiles * num_blocks * num_parts * tiling.outputs * tiling.rows if num_parts > 1 else 1
    assert num_parts == 1 or num_tiles * num_blocks <= MAX_COUNTERS
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
    """How many parts of each block have ended; programs leave zeros. Kernels of one stream at a time use it."""
    return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)


def _is_interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels; it multiplies bfloat16 as if it were integers."""
    return bool(triton.knobs.runtime.interpret)


# Only what is the same at every call of a layer may be specialized on: nothing is compiled at a request.
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
    partial,  # [tiles, blocks, PARTS, OUTPUTS, ROWS] float32, where there are parts
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
        place = (tl.program_id(2) * tl.num_programs(0) + block) * PARTS
        cells = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        held = partial + place.to(tl.int64) * (OUTPUTS * ROWS) + cells
        is_row = (rows < stop)[None, :] & (outputs >= 0)[:, None]
        tl.store(held + part * (OUTPUTS * ROWS), total, mask=is_row)
        tl.debug_barrier()  # all of it is written before the part counts
        if tl.atomic_add(counters + place // PARTS, 1, sem="acq_rel") < PARTS - 1:
            return
        total = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for number in range(PARTS):
            total += tl.load(held + number * (OUTPUTS * ROWS), mask=is_row, other=0.0, cache_modifier=".cg")
        tl.store(counters + place // PARTS, 0)

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
    """The group of a tile of rows, the tile's first row, the one after the group's last. Tiles beyond have no rows."""
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
    """Add the products of a tile of signs with the inputs of a tile of rows."""
    even, odd = tl.split(
        tl.reshape(values, [ROWS, BYTES, 2, 2, 2])
    )  # by bit 0 of an input's number, then 1, then 2
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
    """Add the product of the signs at one bit of `packed` [outputs, bytes] with `values` [rows, bytes]."""
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
