"""Counts deaths of the server's processes and gives up after too many in a row. Starts nothing."""

from __future__ import annotations

import logging
import time
from collections import deque

from server.errors import EngineFailed

log = logging.getLogger(__name__)

# Deaths further apart than this are not in a row.
WINDOW_S = 60.0


class Restarts:
    """The deaths of one kind of process within the last `WINDOW_S` seconds."""

    def __init__(self, what: str, max_deaths: int) -> None:
        self._what = what
        self._max_deaths = max_deaths
        self._deaths: deque[float] = deque()

    def count_death(self, code: int) -> None:
        """Count a death with this exit code, and log it.

        Raises:
            EngineFailed: it is one more than may be.
        """
        now = time.monotonic()
        self._deaths.append(now)
        while now - self._deaths[0] > WINDOW_S:
            self._deaths.popleft()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        if len(self._deaths) > self._max_deaths:
            raise EngineFailed(
                f"{self._what} has ended {len(self._deaths)} times within {WINDOW_S:g} s, at last with {how}: "
                "see its log, then start the server again"
            )
        log.error("%s has ended with %s: it is started again", self._what, how)
