"""Sign masks packed eight to a byte. Must not know scales, files or models.

Bit i of byte j is input ``8j + i`` (least significant first); a set bit is +1, a clear bit -1; pad bits are 0.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def packed_width(in_features: int) -> int:
    """Return the bytes of one output row of `in_features` signs."""
    return (in_features + 7) // 8


def pack_signs(
    positive: Tensor,  # [out, in] bool, or a real dtype where > 0 means +1
) -> Tensor:  # [out, ceil(in / 8)] uint8
    """Pack a sign mask row by row. In a real dtype zero counts as -1; pass a bool mask to choose otherwise."""
    mask = positive if positive.dtype == torch.bool else positive > 0
    return torch.from_numpy(np.packbits(mask.numpy(), axis=-1, bitorder="little"))


def unpack_mask(
    packed: Tensor,  # [out, ceil(in / 8)] uint8
    in_features: int,
) -> Tensor:  # [out, in] bool
    """The inverse of `pack_signs`, as a mask: True where the sign is +1."""
    bits = np.unpackbits(packed.numpy(), axis=-1, count=in_features, bitorder="little")
    return torch.from_numpy(bits).view(torch.bool)


def unpack_signs(
    packed: Tensor,  # [out, ceil(in / 8)] uint8
    in_features: int,
) -> Tensor:  # [out, in] float32, each -1 or +1
    """The inverse of `pack_signs`, as numbers."""
    return unpack_mask(packed, in_features).float().mul_(2).sub_(1)


def num_stray_bits(packed: Tensor, in_features: int) -> int:
    """Count the rows of `packed` that have a pad bit set; a well-formed mask has none."""
    used = in_features % 8
    if used == 0:
        return 0
    return int((packed[:, -1] >> used).count_nonzero())
