"""The products on the CPU: signs stay packed, sixteen of them select sixteen lanes of a vector. x86-64 and Arm alike.

A signed dot product is ``2 * (sum of x where the sign is +1) - sum of x``; the masked sum is one vector select and one
add per sixteen inputs, which LLVM lowers to what the processor has. Parallel over output rows; call it from one thread.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from torch import Tensor

LANES = 16  # signs that one step selects by
UNROLL = 4  # independent accumulators, so that additions overlap
PARALLEL_SIGNS = 1 << 19  # below, waking threads costs more than they save, and far more on a busy machine

numba.config.THREADING_LAYER = "omp"  # type: ignore[attr-defined]  # workqueue aborts the process when two threads call a kernel


def onebit_matmul(
    x: Tensor,  # [rows, in], any float dtype
    signs: Tensor,  # [out, ceil(in / 8)] uint8; a set bit is +1, pad bits are 0
    factor_out: Tensor,  # [out] float32
    factor_in: Tensor | None,  # [in] float32
) -> Tensor:  # [rows, out] float32
    """``factor_out * (B @ (factor_in * x))``; no unpacked copy of the signs is made."""
    inputs = (x.float() if factor_in is None else x.float() * factor_in).contiguous()
    out = torch.empty(len(x), len(signs), dtype=torch.float32)
    sums = inputs.sum(dim=1)
    product = _parallel if out.numel() * x.shape[1] >= PARALLEL_SIGNS else _serial
    product(inputs.numpy(), signs.contiguous().numpy(), factor_out.numpy(), sums.numpy(), out.numpy())
    return out


@intrinsic
def _masked_sum(typing_context: Any, values: Any, mask: Any, num_blocks: Any) -> Any:
    """Sum of the float32 at `values` whose bit at `mask` is set, over `num_blocks` times LANES * UNROLL of them.

    `values` and `mask` are addresses; the bits are read as uint16 words, little-endian.
    """
    signature = types.float32(types.uintp, types.uintp, types.intp)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, mask, num_blocks = arguments
        word, index = ir.IntType(LANES), ir.IntType(64)
        vector = ir.VectorType(ir.FloatType(), LANES)
        values = builder.inttoptr(values, vector.as_pointer())
        mask = builder.inttoptr(mask, word.as_pointer())
        zero = ir.Constant(vector, [0.0] * LANES)

        before = builder.block
        loop, done = builder.append_basic_block("loop"), builder.append_basic_block("done")
        builder.cbranch(builder.icmp_signed(">", num_blocks, ir.Constant(num_blocks.type, 0)), loop, done)

        builder.position_at_end(loop)
        step = builder.phi(index)
        step.add_incoming(ir.Constant(index, 0), before)
        sums = []
        for _ in range(UNROLL):
            total = builder.phi(vector)
            total.add_incoming(zero, before)
            sums.append(total)
        grown = []
        for lane, total in enumerate(sums):
            position = builder.add(builder.mul(step, ir.Constant(index, UNROLL)), ir.Constant(index, lane))
            block = builder.load(builder.gep(values, [position]))
            block.align = 4
            bits = builder.load(builder.gep(mask, [position]))
            bits.align = 1
            chosen = builder.bitcast(bits, ir.VectorType(ir.IntType(1), LANES))
            grown.append(builder.fadd(total, builder.select(chosen, block, zero)))
        following = builder.add(step, ir.Constant(index, 1))
        step.add_incoming(following, loop)
        for total, sum_ in zip(sums, grown, strict=True):
            total.add_incoming(sum_, loop)
        builder.cbranch(builder.icmp_signed("<", following, num_blocks), loop, done)

        builder.position_at_end(done)
        final = []
        for sum_ in grown:
            total = builder.phi(vector)
            total.add_incoming(zero, before)
            total.add_incoming(sum_, loop)
            final.append(total)
        vector_sum = builder.fadd(builder.fadd(final[0], final[1]), builder.fadd(final[2], final[3]))
        result = ir.Constant(ir.FloatType(), 0.0)
        for lane in range(LANES):
            result = builder.fadd(
                result, builder.extract_element(vector_sum, ir.Constant(ir.IntType(32), lane))
            )
        return result

    return signature, codegen


def _matmul(
    x: np.ndarray,  # [rows, in] float32, contiguous
    signs: np.ndarray,  # [out, width] uint8, contiguous rows
    factor_out: np.ndarray,  # [out] float32
    sums: np.ndarray,  # [rows] float32: the sum of each row of x
    out: np.ndarray,  # [rows, out] float32
) -> None:
    num_rows, in_features = x.shape
    block = LANES * UNROLL
    num_blocks = in_features // block
    for o in numba.prange(signs.shape[0]):
        mask = signs[o].ctypes.data
        for row in range(num_rows):
            positive = _masked_sum(x[row].ctypes.data, mask, num_blocks)  # type: ignore[call-arg,var-annotated]
            for i in range(num_blocks * block, in_features):
                if signs[o, i >> 3] >> (i & 7) & 1:
                    positive += x[row, i]
            out[row, o] = factor_out[o] * (np.float32(2) * positive - sums[row])


# With a signature they compile at import, and not under somebody's first request.
_SIGNATURE = "void(float32[:, ::1], uint8[:, ::1], float32[::1], float32[::1], float32[:, ::1])"
_serial = numba.njit(_SIGNATURE, nogil=True, error_model="numpy")(_matmul)
_parallel = numba.njit(_SIGNATURE, nogil=True, error_model="numpy", parallel=True)(_matmul)
