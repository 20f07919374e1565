"""Packed token bitmasks as llguidance writes them: bit ``i % 8`` of byte ``i // 8`` allows token ``i``.

Owns their size and what a valid one is.
"""

from __future__ import annotations

from server.errors import EngineFailed
from server.protocol.request import Request

# llguidance writes words of 32 bits.
WORD_BITS = 32


def mask_bytes(num_embeddings: int) -> int:
    """Return the size in bytes of a mask for token ids below `num_embeddings`."""
    return -(-num_embeddings // WORD_BITS) * WORD_BITS // 8


def check_mask(bits: bytes, num_embeddings: int) -> None:
    """Raise EngineFailed if a mask has another size than `mask_bytes`."""
    if len(bits) != mask_bytes(num_embeddings):
        raise EngineFailed(
            f"a token mask has {len(bits)} bytes, and one for {num_embeddings} tokens has "
            f"{mask_bytes(num_embeddings)}: send the request again"
        )


def allows_any(bits: bytes, num_embeddings: int) -> bool:
    """Return whether a mask allows a token id below `num_embeddings`; the bits behind it mean nothing."""
    num_whole, num_rest = divmod(num_embeddings, 8)
    # Comparing with zeros takes less than a microsecond.
    if bits[:num_whole] != bytes(num_whole):
        return True
    return num_rest > 0 and bits[num_whole] % (1 << num_rest) > 0


def check_first_mask(request: Request, first_mask: bytes | None) -> None:
    """Raise EngineFailed unless a constrained request comes with a valid mask, and any other without one."""
    if request.sampling_params.is_constrained != (first_mask is not None):
        kind = (
            "a constrained request came without"
            if first_mask is None
            else "an unconstrained request came with"
        )
        raise EngineFailed(f"{kind} a token mask: send the request again")
    if first_mask is not None:
        check_mask(first_mask, request.num_embeddings)
