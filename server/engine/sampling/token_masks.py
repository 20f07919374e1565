"""Apply packed token bitmasks to logits. Knows no sequence and no grammar."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


def apply_masks(
    logits: Tensor,  # [rows, vocab] float32, changed in place
    masks: Sequence[bytes],  # one per row, as `server/protocol/masks.py` describes
) -> Tensor:
    """Set the logits of tokens that a row's mask does not allow to minus infinity; keep the others bit for bit.

    A mask may be shorter than the vocabulary of the batch: tokens beyond it are not allowed. NaN stays NaN.
    """
    num_bytes = -(-logits.shape[1] // 8)
    packed = b"".join(mask[:num_bytes].ljust(num_bytes, b"\0") for mask in masks)
    # In memory that may be written to, as torch asks for.
    values = torch.frombuffer(bytearray(packed), dtype=torch.uint8).view(len(masks), num_bytes)
    # One copy to the device per byte, not per token.
    bounds = functional.embedding(values.to(logits.device).int(), _BOUNDS.to(logits.device))
    return torch.minimum(logits, bounds.flatten(1)[:, : logits.shape[1]], out=logits)


def _bounds() -> Tensor:
    """Return the upper bounds ``[256, 8]`` of eight logits for each value of their byte of a mask."""
    allowed = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return torch.where(allowed == 1, torch.inf, -torch.inf)


# Looked up, because comparisons of single bits take several times as long.
_BOUNDS = _bounds()
