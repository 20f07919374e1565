"""Add a coded delta to base weights and round once, with numba on the CPU in one pass over memory.

Equal bit for bit to adding `MatrixDelta.dense` to the base in float32. The inner loop is LLVM vector code, because
numba does not turn packed signs into a vector mask by itself; LLVM lowers it for any processor. Call it from one
thread: numba's fallback threading layer ends the process on concurrent calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from compressor.codec import row_blocks
from compressor.convert import SOURCES
from deltastore.compiled import numba_cache
from deltastore.format.matrix import MatrixDelta, SignPlane

LANES = 32  # 64 bytes of 16-bit weights
# Distance of the prefetch in a row; without it the kernel takes 1.5 times as long.
PREFETCH_BYTES = 4096

I1, I8, I16, I32, I64 = (ir.IntType(width) for width in (1, 8, 16, 32, 64))
F32 = ir.FloatType()
BITS = {
    torch.bfloat16: (torch.uint16, I16),
    torch.float16: (torch.uint16, I16),
    torch.float32: (torch.uint32, I32),
}
BF16_NAN = 0x7FC0  # torch's rounding of NaN

Vector = Any  # an LLVM value; llvmlite has no types of its own


def merge_delta(
    base: Tensor,  # [rows, in] bfloat16, float16 or float32
    delta: MatrixDelta,
    rows: slice,  # of the delta; as many as `base` has
    out: Tensor,  # [rows, in] any of the three
) -> None:
    """Write ``base + delta`` of some rows into `out`, both contiguous."""
    if delta.num_planes == 1 and delta.rank == 0:
        merge_rows(base, delta.planes[0], rows, out)
        return
    first, _, _ = rows.indices(delta.out_features)
    # Blocks are so small that their sum stays in a core's cache.
    for block in row_blocks(tuple(base.shape)):
        own = slice(first + block.start, first + block.stop)
        # Minus zero plus any number is that number, zeros of both signs too.
        total = torch.full(base[block].shape, -0.0)
        for plane in delta.planes:
            merge_rows(total, plane, own, total)
        delta.add_residual(total, own)
        out[block] = total.add_(base[block])


def merge_rows(
    base: Tensor,  # [rows, in] bfloat16, float16 or float32
    delta: SignPlane,
    rows: slice,  # of the delta; as many as `base` has
    out: Tensor,  # [rows, in] any of the three; may be `base`
) -> None:
    """Write ``base + delta`` of some rows of one plane into `out`.

    Raises:
        ValueError: `base` or `out` is not contiguous, or their shapes differ.
    """
    # The kernel computes addresses, so it would write outside of its arrays.
    if not base.is_contiguous() or not out.is_contiguous() or base.shape != out.shape:
        raise ValueError(
            f"base {tuple(base.shape)} and out {tuple(out.shape)} must be contiguous and of one shape"
        )
    scale_in = torch.ones(delta.in_features) if delta.scale_in is None else delta.scale_in.float()
    _kernel(base.dtype, out.dtype)(
        base.view(BITS[base.dtype][0]).numpy(),
        delta.signs[rows].numpy(),
        delta.factor_out()[rows].contiguous().numpy(),
        scale_in.numpy(),
        out.view(BITS[out.dtype][0]).numpy(),
    )


@cache
def _kernel(source: torch.dtype, target: torch.dtype) -> Callable[..., None]:
    """Compile the loop for one pair of dtypes, in about a second, or load it."""
    merge_lanes, merge_one = _step(source, target, LANES), _step(source, target, 1)
    source_bytes, target_bytes = source.itemsize, target.itemsize

    def kernel(base, signs, scale_out, scale_in, out):  # type: ignore[no-untyped-def]
        num_rows, width = base.shape
        packed = signs.shape[1]
        base_at, signs_at, scale_at, out_at = (
            base.ctypes.data,
            signs.ctypes.data,
            scale_in.ctypes.data,
            out.ctypes.data,
        )
        whole = width // LANES * LANES
        for row in prange(num_rows):
            first, sign_row = row * width, signs_at + row * packed
            for column in range(0, whole, LANES):
                merge_lanes(
                    base_at + (first + column) * source_bytes,
                    sign_row + column // 8,
                    scale_at + column * 4,
                    out_at + (first + column) * target_bytes,
                    scale_out[row],
                    0,
                )
            for column in range(whole, width):
                merge_one(
                    base_at + (first + column) * source_bytes,
                    sign_row + column // 8,
                    scale_at + column * 4,
                    out_at + (first + column) * target_bytes,
                    scale_out[row],
                    column % 8,
                )

    kernel.__qualname__ = f"merge-{source}-{target}"
    stored, merged = (str(BITS[dtype][0]).removeprefix("torch.") for dtype in (source, target))
    signature = f"void({stored}[:, ::1], uint8[:, ::1], float32[::1], float32[::1], {merged}[:, ::1])"
    return numba_cache.function(kernel, signature, SOURCES, parallel=True, error_model="numpy")


def _step(source: torch.dtype, target: torch.dtype, lanes: int) -> Any:
    """Return a numba function over addresses that merges `lanes` neighbours of one row.

    Its last argument is the bit at which their signs begin; it is 0 for more than one lane.
    """

    @intrinsic
    def step(context, base, signs, scale_in, out, scale_out, bit):  # type: ignore[no-untyped-def]
        def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
            base, signs, scale_in, out, scale_out, bit = args
            _prefetch(b, b.add(base, I64(PREFETCH_BYTES)))
            weights = _load(b, base, BITS[source][1], lanes, source.itemsize)
            scales = _load(b, scale_in, F32, lanes, 4)
            # The order of `dense` is (sign * out) * in; a sign commutes with rounding, so it may come last.
            size = b.bitcast(b.fmul(scales, _splat(b, scale_out, F32, lanes)), _vector(I32, lanes))
            flipped = b.xor(size, _constant(I32, 1 << 31, lanes))
            delta = b.select(_mask(b, signs, bit, lanes), size, flipped)
            merged = b.fadd(_widen(b, weights, source, lanes), b.bitcast(delta, _vector(F32, lanes)))
            rounded = _narrow(b, merged, target, lanes)
            store = b.store(rounded, b.inttoptr(out, rounded.type.as_pointer()))
            store.align = target.itemsize
            return context.get_dummy_value()

        address = types.intp
        return types.void(address, address, address, address, types.float32, types.intp), emit

    return step


def _mask(b: Any, signs: Vector, bit: Vector, lanes: int) -> Vector:
    """Emit one bit per lane, set where the sign is +1."""
    if lanes == 1:
        byte = b.load(b.inttoptr(signs, I8.as_pointer()))
        return b.bitcast(b.trunc(b.lshr(byte, b.trunc(bit, I8)), I1), _vector(I1, 1))
    packed = b.load(b.inttoptr(signs, ir.IntType(lanes).as_pointer()))
    packed.align = 1
    return b.bitcast(packed, _vector(I1, lanes))


def _widen(b: Any, weights: Vector, source: torch.dtype, lanes: int) -> Vector:
    """Emit the exact conversion of stored bits to float32."""
    if source == torch.bfloat16:
        shifted = b.shl(b.zext(weights, _vector(I32, lanes)), _constant(I32, 16, lanes))
        return b.bitcast(shifted, _vector(F32, lanes))
    if source == torch.float16:
        return b.fpext(b.bitcast(weights, _vector(ir.HalfType(), lanes)), _vector(F32, lanes))
    return b.bitcast(weights, _vector(F32, lanes))


def _narrow(b: Any, values: Vector, target: torch.dtype, lanes: int) -> Vector:
    """Emit the rounding of float32 to stored bits, to nearest with ties to even."""
    bits = b.bitcast(values, _vector(I32, lanes))
    if target == torch.bfloat16:
        odd = b.and_(b.lshr(bits, _constant(I32, 16, lanes)), _constant(I32, 1, lanes))
        up = b.add(b.add(bits, _constant(I32, 0x7FFF, lanes)), odd)
        is_nan = b.fcmp_unordered("uno", values, values)
        kept = b.select(is_nan, _constant(I32, BF16_NAN, lanes), b.lshr(up, _constant(I32, 16, lanes)))
        return b.trunc(kept, _vector(I16, lanes))
    if target == torch.float16:
        return b.bitcast(b.fptrunc(values, _vector(ir.HalfType(), lanes)), _vector(I16, lanes))
    return bits


def _prefetch(b: Any, address: Vector) -> None:
    pointer = I8.as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    prefetch = cgutils.get_or_insert_function(b.module, signature, "llvm.prefetch.p0")  # type: ignore[no-untyped-call]
    # A read, kept in all caches, of data.
    b.call(prefetch, [b.inttoptr(address, pointer), I32(0), I32(3), I32(1)])


def _load(b: Any, address: Vector, element: Any, lanes: int, align: int) -> Vector:
    loaded = b.load(b.inttoptr(address, _vector(element, lanes).as_pointer()))
    loaded.align = align
    return loaded


def _splat(b: Any, scalar: Vector, element: Any, lanes: int) -> Vector:
    undefined = ir.Constant(_vector(element, lanes), ir.Undefined)
    return b.shuffle_vector(b.insert_element(undefined, scalar, I32(0)), undefined, _constant(I32, 0, lanes))


def _vector(element: Any, lanes: int) -> Any:
    return ir.VectorType(element, lanes)


def _constant(element: Any, value: int, lanes: int) -> Vector:
    return ir.Constant(_vector(element, lanes), [value] * lanes)
