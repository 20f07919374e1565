"""Bounds that the engine sets on requests. Knows no request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds on requests."""

    max_open: int  # requests that run or wait
    max_model_len: int  # tokens of prompt and output together
    load_timeout_s: float
    mask_timeout_s: float  # for which a constrained sequence waits for its mask
