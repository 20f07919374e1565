"""The registry's contents, as an HTTP process reads them for a scrape that it answers.

Tenants size what is read: neither the supervisor nor the engine reads it, and nothing of it is kept.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

from deltastore.errors import RegistryUnavailable
from deltastore.registry import Registry
from deltastore.registry.reports import Usage
from server.metrics.service import RegistryState, read_registry
from server.volume.calls import RegistryCalls

log = logging.getLogger(__name__)

# A registry that has not answered by then is left out.
READ_S = 2.0
# Between two counts of the registry's objects.
COUNT_S = 60.0


class RegistryScrapes:
    """Reads a registry for scrapes, one at a time. Event loop only."""

    def __init__(self, registry: Registry, calls: RegistryCalls) -> None:
        self._registry = registry
        self._calls = calls
        self._has_answered = True
        self._reading: asyncio.Task[RegistryState | None] | None = None
        self._usage: Usage | None = None
        self._counted_at = 0.0

    async def read(self, labels: frozenset[str]) -> RegistryState | None:
        """Return the registry's state; None if it cannot be read, or if it does not answer within `READ_S`."""
        # At most one thread waits for a file system that hangs. What a scrape before this one asked for is as good.
        reading = self._reading
        if reading is None:
            reading = self._reading = asyncio.create_task(self._read(labels))
        await asyncio.wait([reading], timeout=READ_S)
        if reading.done():
            self._has_answered = True
            return reading.result()
        if self._has_answered:
            log.error("metrics without the registry: it does not answer within %g s", READ_S)
        self._has_answered = False
        return None

    async def _read(self, labels: frozenset[str]) -> RegistryState | None:
        is_new = self._usage is not None and time.monotonic() - self._counted_at < COUNT_S
        usage = self._usage if is_new else None
        try:
            state = await self._calls.run_long(partial(read_registry, self._registry, labels, usage), None)
        except RegistryUnavailable:
            return None
        finally:
            self._reading = None
        if state is not None and not is_new:
            self._usage, self._counted_at = state.usage, time.monotonic()
        return state
