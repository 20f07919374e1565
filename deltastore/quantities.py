"""Numbers with units, as messages and tables show them. Knows nothing of what they count."""

from __future__ import annotations

from tqdm import tqdm


def size_text(num_bytes: int) -> str:
    """Return bytes with three digits and an SI prefix, such as 1.23GB; fewer than 1000 as they are."""
    return f"{num_bytes}B" if num_bytes < 1000 else tqdm.format_sizeof(num_bytes, "B")
