"""Who waits for the engine: requests for their turn or their delta, and calls that want a delta loaded or unloaded.

Values and one queue; the engine thread alone touches them.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from deltastore.records import VersionRecord
from server.deltas.resident import ResidentDelta
from server.engine.request import Request


@dataclass(slots=True, eq=False)
class Waiting:
    """An admitted request that does not run yet."""

    request: Request
    admitted_at: float = field(default_factory=time.monotonic)
    cold: bool = False  # whether its delta had to be loaded
    delta: ResidentDelta | None = None  # held in its slot from the moment it is there
    loaded_at: float | None = None  # when a cold request's delta became resident

    @property
    def load_s(self) -> float:
        """Seconds from admission to the delta being there; 0 for a warm request."""
        return 0.0 if self.loaded_at is None else self.loaded_at - self.admitted_at


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
