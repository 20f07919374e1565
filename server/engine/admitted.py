"""Who is with the engine: admitted requests until they are answered, and calls that want a delta loaded or unloaded.

Values that the engine thread alone touches.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from deltastore.registry.records import VersionRecord
from server.engine.request import Request, Timings
from server.engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class Admitted:
    """A request between admission and its last event."""

    request: Request
    found: str  # where its delta was at admission: device, host or disk; device for the base
    admitted_at: float = field(default_factory=time.monotonic)
    loaded_at: float | None = None  # when a cold request's delta became resident
    started_at: float | None = None  # of its first step
    first_token_at: float | None = None
    num_generated: int = 0
    num_begun: int = 0  # of its samples
    live: list[Sequence] = field(default_factory=list)  # samples that have begun and not ended

    @property
    def cold(self) -> bool:
        """Whether its delta had to be loaded."""
        return self.found != "device"

    def timings(self, now: float) -> Timings:
        """Of what has happened so far; what has not counts until now."""
        started = now if self.started_at is None else self.started_at
        first = now if self.first_token_at is None else self.first_token_at
        return Timings(
            queue_s=started - self.admitted_at,
            load_s=0.0 if self.loaded_at is None else self.loaded_at - self.admitted_at,
            cold=self.cold,
            ttft_s=first - self.admitted_at,
            total_s=now - self.admitted_at,
        )


@dataclass(slots=True, eq=False)
class Prefetch:
    """A call that wants a version resident, and perhaps pinned."""

    record: VersionRecord
    pin: bool
    future: Future[None]
    since: float = field(default_factory=time.monotonic)


@dataclass(slots=True, eq=False)
class Unload:
    """A call that wants a version out of its slot, as soon as nobody runs on it."""

    digest: str
    future: Future[None]
