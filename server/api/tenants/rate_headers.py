"""`x-ratelimit-*` headers. Knows no limit's count."""

from __future__ import annotations

import math

from server.protocol.limits import Rates


def rate_headers(rates: Rates | None) -> dict[str, str]:
    """Return `x-ratelimit-*` for the limits that a tenant has; durations are seconds with their unit, as OpenAI's."""
    headers: dict[str, str] = {}
    if rates is not None:
        for name, rate in (("requests", rates.requests), ("tokens", rates.tokens)):
            if rate is not None:
                headers |= {
                    f"x-ratelimit-limit-{name}": str(rate.limit),
                    f"x-ratelimit-remaining-{name}": str(rate.remaining),
                    f"x-ratelimit-reset-{name}": f"{math.ceil(rate.reset_s)}s",
                }
    return headers
