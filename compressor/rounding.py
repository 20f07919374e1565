"""The digits of measured figures that are written. Imports nothing, so that every package here can use it."""

from __future__ import annotations


def rounded(value: float) -> float:
    """Round to six digits: further ones depend on the order of sums, which differs between machines."""
    return float(f"{value:.6g}")
