"""Products of many rows of one matrix: tiles of its signs are expanded to numbers for torch's own product.

A tile fits a second-level cache, is used at once and overwritten by the next one. In bfloat16 the product runs on the
processor's units for it, and rounds inputs times `factor_in` and the product before it is added.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from server.kernels import openmp
from server.kernels.addresses import array, at

# Without lookup, groups of at least this many rows are faster in float32 than by selection, measured with AVX2.
MIN_ROWS = 32
# Bytes of a tile of expanded signs. Processors with units for bfloat16 have larger second-level caches.
TILE_BYTES = {torch.float32: 2**19, torch.bfloat16: 2**21}

# The kernel's argument: addresses, and sizes.
FIELDS = ("signs", "expanded", "numbers", "half", "num_rows", "width")
JOB = np.dtype([(name, np.int64) for name in FIELDS])
PACK = struct.Struct(f"={len(FIELDS)}q").pack


def add_product(
    output: Tensor,  # [rows, out], any float dtype, changed in place
    x: Tensor,  # [rows, in], any float dtype
    matrix: tuple[
        Tensor, Tensor, Tensor | None
    ],  # signs [out, ceil(in / 8)] uint8; factor_out, factor_in: float32
    dtype: torch.dtype,  # of the product: float32 or bfloat16
) -> None:
    """Add ``factor_out * (B @ (factor_in * x))``, summed in float32 and rounded to the output's dtype.

    With bfloat16, inputs times `factor_in` and each product are rounded to it before.
    """
    signs, factor_out, factor_in = matrix
    inputs = (x if factor_in is None else x.float() * factor_in).to(dtype)
    width = signs.shape[1]
    num_outputs = max(1, TILE_BYTES[dtype] // (8 * width * dtype.itemsize))
    tile = torch.empty(num_outputs, 8 * width, dtype=dtype)
    for start in range(0, len(signs), num_outputs):
        part = signs[start : start + num_outputs]
        _expand(part, tile)
        product = inputs @ tile[: len(part), : x.shape[1]].T
        block = output[:, start : start + len(part)]
        block.copy_(torch.addcmul(block.float(), product.float(), factor_out[start : start + len(part)]))


def _expand(signs: Tensor, tile: Tensor) -> None:
    numbers = _numbers(tile.dtype)
    is_half = tile.dtype == torch.bfloat16
    job = PACK(signs.data_ptr(), tile.data_ptr(), numbers.data_ptr(), is_half, *signs.shape)
    compiled_kernel()(job, torch.get_num_threads())


@cache
def _numbers(dtype: torch.dtype) -> Tensor:
    """Return the eight signs of every byte, [256, 8]."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return 2 * torch.from_numpy(bits).to(dtype) - 1


@cache
def compiled_kernel() -> Callable[[bytes, int], None]:
    """Compile the kernel that expands signs as ``call(job, num_threads)``, or load it."""
    return openmp.team(_expand_share, JOB)


@numba.njit(nogil=True, error_model="numpy")
def _expand_share(job: Any, thread: int, num_threads: int) -> None:
    """Expand one thread's share of the rows."""
    signs = array(at(job.signs), (job.num_rows, job.width), np.uint8)
    begin = job.num_rows * thread // num_threads
    end = job.num_rows * (thread + 1) // num_threads
    # Words of 64 bits are copied at once: two for the eight bfloat16 numbers of a byte, four for float32.
    words = 2 if job.half else 4
    numbers = array(at(job.numbers), (256, words), np.uint64)
    expanded = array(at(job.expanded), (job.num_rows, job.width, words), np.uint64)
    for row in range(begin, end):
        for i in range(job.width):
            byte = signs[row, i]
            expanded[row, i, 0] = numbers[byte, 0]
            expanded[row, i, 1] = numbers[byte, 1]
            if words == 4:
                expanded[row, i, 2] = numbers[byte, 2]
                expanded[row, i, 3] = numbers[byte, 3]
