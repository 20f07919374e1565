"""The HTTP request that the running task works for: its id and its place in a trace.

The middleware sets it. Tasks and threads that a request starts inherit it, so that their log lines can name it.
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Self

# https://www.w3.org/TR/trace-context/: version, trace id, id of the caller's span, flags; later versions may add more.
TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?"
)
MAX_TRACEPARENT = 512


@dataclass(frozen=True, slots=True)
class RequestContext:
    """One HTTP request.

    Attributes:
        id: its X-Request-Id.
        traceparent: the header of this name, if it is valid.
    """

    id: str
    traceparent: str | None = None

    @classmethod
    def of(cls, request_id: str, traceparent: str | None) -> Self:
        """Make the context of a request; an invalid `traceparent` is ignored, as its specification asks."""
        return cls(request_id, traceparent if trace_id_of(traceparent) else None)


def trace_id_of(traceparent: str | None) -> str | None:
    """Return the trace's id, 32 hex digits, or None if the header is missing or invalid."""
    if traceparent is None or len(traceparent) > MAX_TRACEPARENT:
        return None
    found = TRACEPARENT.fullmatch(traceparent)
    if found is None or (traceparent.startswith("00-") and len(traceparent) != 55):
        return None
    return found[1]


current_request: ContextVar[RequestContext | None] = ContextVar("current_request", default=None)
