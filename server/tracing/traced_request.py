"""A request under way, as its span will need it. A file of its own, because routes need it without OpenTelemetry."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from server.protocol.request import Request

# OpenTelemetry's values of `gen_ai.operation.name`.
Operation = Literal["chat", "text_completion"]


@dataclass(slots=True)
class TracedRequest:
    """A submitted request.

    Attributes:
        num_tokens: generated tokens by sequence.
        submitted_at: in seconds since 1970.
    """

    request: Request
    operation: Operation
    num_tokens: Counter[int] = field(default_factory=Counter)
    submitted_at: float = field(default_factory=time.time)
