"""Products of many rows on processors without AVX-512: tiles of signs are expanded to float32 for torch's product.

A tile fits a second-level cache, is used at once and overwritten by the next one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltastore.compiled import numba_cache
from server.kernels.sources import SOURCES

# Groups of at least this many rows are faster than by selection, measured with AVX2.
MIN_ROWS = 32
# Size of a tile of expanded signs.
TILE_BYTES = 2**19


def add_product(
    output: Tensor,  # [rows, out], any float dtype, changed in place
    x: Tensor,  # [rows, in], any float dtype
    signs: Tensor,  # [out, ceil(in / 8)] uint8
    factor_out: Tensor,  # [out] float32
    factor_in: Tensor | None,  # [in] float32
) -> None:
    """Add ``factor_out * (B @ (factor_in * x))``, summed in float32 and rounded once to the output's dtype."""
    inputs = x.float() if factor_in is None else x.float() * factor_in
    width = signs.shape[1]
    num_outputs = max(1, TILE_BYTES // (32 * width))
    tile = torch.empty(num_outputs, 8 * width)
    for start in range(0, len(signs), num_outputs):
        part = signs[start : start + num_outputs]
        compiled_kernel()(part.numpy(), _numbers(), tile.numpy())
        product = inputs @ tile[: len(part), : x.shape[1]].T
        block = output[:, start : start + len(part)]
        block.copy_(torch.addcmul(block.float(), product, factor_out[start : start + len(part)]))


@cache
def _numbers() -> np.ndarray:
    """Return the eight signs of every byte as float32, [256, 8]."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return 2 * bits.astype(np.float32) - 1


@cache
def compiled_kernel() -> Any:
    """Compile `_expand_rows`, or load it."""
    signature = "void(uint8[:, ::1], float32[:, ::1], float32[:, ::1])"
    return numba_cache.function(_expand_rows, signature, SOURCES, nogil=True, error_model="numpy")


def _expand_rows(signs: np.ndarray, numbers: np.ndarray, expanded: np.ndarray) -> None:
    """Write packed signs as float32, [rows, 8 * bytes]."""
    for row in range(signs.shape[0]):
        for i in range(signs.shape[1]):
            for k in range(8):
                expanded[row, 8 * i + k] = numbers[signs[row, i], k]
