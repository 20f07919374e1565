"""Runs work on one variant's text in the worker pool: deadlines, errors that name the variant, and a pause after kills.

Event loop only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, TypeVarTuple

from server.errors import InvalidRequest, WorkerDied, WorkerTimeout
from server.fair_limiter import Share
from server.workers.limits import Limits
from server.workers.pool import WorkerPool

# Encoding, rendering or decoding of one request or step.
WORK_S = 5.0
WORK_LIMITS = Limits(memory_bytes=1 << 30, cpu_s=2.0)
# Loading a tokenizer, twice as large as the largest known one, beside other work.
LOAD_S = 30.0
LOAD_LIMITS = Limits(memory_bytes=2 << 30, cpu_s=15.0)
MIN_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True)
class WorkKind:
    """One kind of work, as errors name it.

    Args:
        subject: the part of the variant that fails.
        advice: the way out.
        pauses: work is refused for a pause after some had to be killed.
    """

    subject: str
    advice: str
    pauses: bool = True


TEXT_WORK = WorkKind("its tokenizer or chat template", "send less text, or upload it repaired")

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class VariantWork:
    """The work of one share of the pool. After work that had to be killed, further work is refused for a pause.

    Args:
        share: the tenant and the variant's digest.
        label: the variant's name in error messages.
        now: a clock in seconds.
        kind: the kind of work.
    """

    def __init__(
        self,
        pool: WorkerPool,
        share: Share,
        label: str,
        now: Callable[[], float] = time.monotonic,
        kind: WorkKind = TEXT_WORK,
    ) -> None:
        self.label = label
        self._pool = pool
        self.share = share
        self._kind = kind
        self._now = now
        self._pause_s = 0.0
        self._paused_until = 0.0
        self._reason = ""

    async def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run a function within `WORK_S` and `WORK_LIMITS`.

        Raises:
            InvalidRequest: the work was killed or crashed, or is refused because earlier work was.
            QueueFull: too much work of this share waits.
            PeraxisError: as `function` raised it.
        """
        return await self._run(WORK_S, WORK_LIMITS, function, *args)

    async def load(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run a function that loads a tokenizer, within `LOAD_S` and `LOAD_LIMITS`; raises as `run` does."""
        return await self._run(LOAD_S, LOAD_LIMITS, function, *args)

    async def _run(self, deadline_s: float, limits: Limits, function: Callable[[*Ts], T], *args: *Ts) -> T:
        self._check_pause()
        try:
            # Checked again when its turn comes: work that waited must not kill one worker after the other.
            result = await self._pool.run(
                self.share, deadline_s, function, *args, limits=limits, check=self._check_pause
            )
        except (WorkerTimeout, WorkerDied) as error:
            self._pause(str(error))
            raise InvalidRequest(
                f"{self.label}: {self._kind.subject} failed: {error}: {self._kind.advice}"
            ) from error
        self._pause_s = 0.0
        return result

    def _check_pause(self) -> None:
        if (left_s := self._paused_until - self._now()) > 0:
            raise InvalidRequest(
                f"{self.label}: {self._kind.subject} failed: {self._reason}: try again in {left_s:.0f} s"
            )

    def _pause(self, reason: str) -> None:
        if not self._kind.pauses:
            return
        self._reason = reason
        self._pause_s = min(max(2 * self._pause_s, MIN_PAUSE_S), MAX_PAUSE_S)
        self._paused_until = self._now() + self._pause_s
