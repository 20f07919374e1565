"""How long pushes and chats wait for a server that starts, restarts or is busy, and with which pauses."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from client.http import NoAnswer, NoServer, ServerRefused

# A server that answers 503, or that answered before, is waited for so long, in seconds.
WAIT_S = 120
# Between two attempts, in seconds.
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0
# Between two lines that tell of the same wait, in seconds.
LINE_INTERVAL_S = 15.0
UNAVAILABLE = 503

log = logging.getLogger(__name__)


def is_unavailable(error: NoAnswer | ServerRefused) -> bool:
    """True if the server takes no call of this kind now: nothing listens, or it answers 503."""
    return isinstance(error, NoServer) or (isinstance(error, ServerRefused) and error.status == UNAVAILABLE)


def asked_s(error: NoAnswer | ServerRefused) -> int:
    """Return the seconds that the server asks to be left alone; 0 if it asks for none."""
    return (error.retry_after_s or 0) if isinstance(error, ServerRefused) else 0


def pause_s(error: NoAnswer | ServerRefused, doubled_s: float) -> float:
    """Return the seconds before the next attempt: `doubled_s` within bounds, and at least what the server asks for."""
    return max(asked_s(error), min(max(doubled_s, FIRST_PAUSE_S), MAX_PAUSE_S))


class ServerWait:
    """One call's wait for its server, or that of a command's calls.

    A port that refuses connections is waited for once it has answered, or if `wait_s` is given: before, its address is
    more likely wrong.

    Args:
        url: The server.
        wait_s: Seconds that a wait lasts at most; None is `WAIT_S`.
        clock: Returns seconds that never go back.
        tell: Called with the lines that tell of the wait.
    """

    def __init__(
        self,
        url: str,
        wait_s: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[str], object] = log.warning,
    ) -> None:
        self._url = url
        self._limit_s = WAIT_S if wait_s is None else wait_s
        self._clock = clock
        self._tell = tell
        self._is_patient = wait_s is not None
        # None while nothing is waited for.
        self._began_at: float | None = None
        self._told_at = 0.0

    def answered(self) -> None:
        """Note that the server has answered a call."""
        self._is_patient = True

    def restart(self) -> None:
        """Let the next failure begin a wait of its own."""
        self._began_at = None

    def next_pause_s(self, error: NoAnswer | ServerRefused) -> float:
        """Return the seconds to sleep before the next attempt.

        A pause is as long as the wait so far, which doubles it; the last one ends at the limit.

        Args:
            error: The failure of the last attempt.

        Raises:
            NoAnswer, ServerRefused: `error`, which waiting does not help or has not helped; a note says how long it
                was waited for.
        """
        if not is_unavailable(error):
            raise error
        if isinstance(error, ServerRefused):
            self.answered()
        elif not self._is_patient:
            raise NoServer(f"{error}, or `wait_s` if it is starting") from error
        now = self._clock()
        if self._began_at is None:
            self._began_at, self._told_at = now, -math.inf
        waited_s = now - self._began_at
        left_s = self._limit_s - waited_s
        if left_s <= 0 or asked_s(error) > left_s:
            if waited_s or asked_s(error):
                asked = f", when the server asked for {asked_s(error)} s more" if left_s > 0 else ""
                error.add_note(f"gave up after {waited_s:.0f} s{asked}: `wait_s` waits longer")
            raise error
        if now - self._told_at >= LINE_INTERVAL_S:
            self._told_at = now
            # The whole error would name the address again, and ways out that are not needed yet.
            reason = "no server answers there" if isinstance(error, NoServer) else error
            self._tell(f"waiting up to {left_s:.0f} s for {self._url}: {reason}")
        return min(pause_s(error, waited_s), left_s)
