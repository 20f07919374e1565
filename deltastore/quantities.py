"""Numbers as messages, tables and manifests show them."""

from __future__ import annotations

from tqdm import tqdm


def size_text(num_bytes: int) -> str:
    """Return bytes with three digits and an SI prefix, such as 1.23GB; fewer than 1000 as they are."""
    return f"{num_bytes}B" if num_bytes < 1000 else tqdm.format_sizeof(num_bytes, "B")


def rounded(value: float) -> float:
    """Round to six digits: further ones depend on the order of sums, which differs between machines."""
    return float(f"{value:.6g}")
