"""Limits of tenants: their files and defaults, and the counts of one server by which work is admitted.

A call is checked before its body is read and counted from then on; its tokens count as they come. `tokens_per_minute`
refuses the next request and never ends a running one. Usage of the last minute is a sliding window: the current
minute's count plus the previous minute's, weighted by the part of that minute that lies within the last 60 seconds.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from deltastore.errors import UsageError
from deltastore.registry.claims import is_bucket
from deltastore.registry.records import NAME, is_name
from server.errors import QueueFull
from server.registry_calls import RegistryCalls
from server.settings import Settings
from server.tenants.records import RecordDirectory, record_files
from server.tenants.tenant import Admitted, Rate, Rates, Refused, TenantLimits, Usage, plain

# Between two looks at the records, which are read at most every 0.5 s, in a bucket every second.
WATCH_S = 0.25


class LimitsDirectory:
    """The limits of all tenants of a registry, as they were read last.

    Args:
        registry: its directory, or `s3://BUCKET/PREFIX`.
        default: limits of tenants without a file.
        calls: of a server, to which the registry's absence is a failure.
    """

    def __init__(
        self, registry: Path | str, default: TenantLimits, calls: RegistryCalls | None = None
    ) -> None:
        """Read the files; raise RegistryUnavailable if the disk fails."""
        self._default = default
        self._directory = RecordDirectory(record_files(registry, "limits"), TenantLimits, NAME, calls)
        self._given = self._directory.read()
        self._damaged = self._directory.damaged

    def of(self, tenant: str) -> TenantLimits:
        """Return a tenant's limits. Reads no file, so that a disk that hangs delays no request.

        Raises:
            QueueFull: its file is damaged, so that its limits are unknown.
        """
        if tenant in self._damaged:
            raise QueueFull(
                f"the limits of tenant {tenant!r} cannot be read: the operator must set them again"
            )
        return self._given.get(tenant, self._default)

    def own(self) -> Mapping[str, TenantLimits]:
        """Read the files that have changed, and return the limits of each tenant that has some of its own.

        Raises:
            RegistryUnavailable: the disk failed.
        """
        return self._directory.read()

    def write(self, tenant: str, limits: TenantLimits) -> None:
        """Replace a tenant's limits. They are durable on return, and every server sees them within a second.

        Raises:
            UsageError: no tenant may have this name.
            RegistryUnavailable, StorageFull: the disk failed; the limits are the old ones or the new ones.
        """
        if not is_name(tenant):
            raise UsageError(
                f"tenant name {tenant!r} is not allowed: take 1 to 64 letters, digits, '.', '_' or '-', "
                "the first of them a letter or a digit"
            )
        self._directory.write(tenant, limits)

    async def watch(self) -> None:
        """Read changed files until cancelled. While the disk fails, the last limits stand."""
        while True:
            await asyncio.sleep(WATCH_S)
            self._given = await self._directory.current()
            self._damaged = self._directory.damaged


log = logging.getLogger(__name__)

MAX_VARIANTS = 10_000
MAX_VERSIONS = 1_000
MAX_STORED_VERSIONS = 20_000


def with_default_limits(settings: Settings) -> Settings:
    """Return the settings of a server with its default limits complete, and log them; without keys, as they are."""
    if settings.auth != "keys":
        return settings
    limits = completed(settings.default_limits)
    shares = {"max_pinned": "half of the slots"}
    if not is_bucket(settings.registry):
        shares["max_stored_bytes"] = "as many as are left free"
    shown = {name: shares.get(name) if value is None else value for name, value in plain(limits).items()}
    given = ", ".join(f"{name} {value}" for name, value in shown.items() if value is not None)
    unlimited = [name for name, value in shown.items() if value is None]
    log.info(
        "limits of tenants without their own: %s; not limited: %s", given, ", ".join(unlimited) or "nothing"
    )
    return settings.model_copy(update={"default_limits": limits})


def completed(given: TenantLimits) -> TenantLimits:
    """Return the limits that the operator gave, and the defaults of those of storage that were not given."""
    defaults = {
        "max_variants": MAX_VARIANTS,
        "max_versions": MAX_VERSIONS,
        "max_stored_versions": MAX_STORED_VERSIONS,
    }
    missing = {name: value for name, value in defaults.items() if getattr(given, name) is None}
    return msgspec.structs.replace(given, **missing)


WINDOW_S = 60
# Added to waits: they end when the count is below the limit, and not when it has just reached it.
MARGIN_S = 0.001
# When one of the tenant's requests or uploads ends is not known; this is when to ask again.
RETRY_S = 1.0
# For messages: what a tenant with this limit may do.
ALLOWED = {
    "requests_per_minute": "send {} request{} per minute",
    "tokens_per_minute": "use {} token{} per minute",
    "max_running": "run {} request{} at a time",
    "max_uploads": "have {} upload{} under way",
}


class SlidingWindow:
    """A count of the last minute."""

    def __init__(self) -> None:
        self._minute = 0
        self._previous = 0
        self._current = 0

    def add(self, amount: int, now_s: float) -> None:
        """Count an amount, also one that exceeds a limit."""
        self._turn(now_s)
        self._current += amount

    def used(self, now_s: float) -> int:
        """Return the count of the last 60 seconds."""
        self._turn(now_s)
        return math.floor(self._previous * self._left_s(now_s) / WINDOW_S + self._current)

    def wait_s(self, limit: int, amount: int, now_s: float) -> float:
        """Return the seconds until `amount`, at most `limit`, more fit below it, if nothing else comes."""
        if self.used(now_s) + amount <= limit:
            return 0.0
        # `used` is rounded down, so the exact count may be anything below this.
        room, left_s = limit - amount + 1, self._left_s(now_s)
        if self._current < room:
            return left_s - (room - self._current) * WINDOW_S / self._previous + MARGIN_S
        # Nothing fits before this minute has become the previous one and has partly passed.
        return left_s + WINDOW_S - room * WINDOW_S / self._current + MARGIN_S

    def _turn(self, now_s: float) -> None:
        minute = int(now_s // WINDOW_S)
        if minute != self._minute:
            self._previous = self._current if minute == self._minute + 1 else 0
            self._current, self._minute = 0, minute

    def _left_s(self, now_s: float) -> float:
        """Return the seconds until the current minute ends."""
        return WINDOW_S - now_s % WINDOW_S


@dataclass(slots=True)
class _TenantUsage:
    """The work of one tenant: of the last minute, and under way."""

    requests: SlidingWindow = field(default_factory=SlidingWindow)
    tokens: SlidingWindow = field(default_factory=SlidingWindow)
    num_running: int = 0
    num_uploads: int = 0
    upload_bytes: int = 0

    def is_idle(self, now_s: float) -> bool:
        """Return whether nothing is under way, and nothing of before counts any more."""
        is_used = self.requests.used(now_s) or self.tokens.used(now_s)
        return not (self.num_running or self.num_uploads or is_used)


@dataclass(slots=True)
class _Work:
    """Requests or an upload under way."""

    usage: _TenantUsage
    kind: Literal["requests", "upload"]
    amount: int  # number of requests, or bytes of the upload

    def count(self, sign: int) -> None:
        """Add the work to its tenant's (1), or take it away (-1)."""
        if self.kind == "requests":
            self.usage.num_running += sign * self.amount
        else:
            self.usage.num_uploads += sign
            self.usage.upload_bytes += sign * self.amount


class RateLimiter:
    """The usage of all tenants. Work under way is kept by HTTP process, so that one that dies frees what it had.

    Args:
        limits_of: returns a tenant's limits now; raises QueueFull if they are unknown.
        clock: returns seconds.
    """

    def __init__(
        self, limits_of: Callable[[str], TenantLimits], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits_of = limits_of
        self._clock = clock
        self._usage: defaultdict[str, _TenantUsage] = defaultdict(_TenantUsage)
        self._work: defaultdict[str, dict[int, _Work]] = defaultdict(dict)  # by process and id
        self._swept_at = clock()

    def admit_requests(
        self, process: str, work_id: int, tenant: str, num_requests: int
    ) -> Admitted | Refused:
        """Count requests of one call; the same id again replaces what was counted, or is released if refused."""
        self._forget_idle()
        limits, usage, now_s = self._limits_of(tenant), self._usage[tenant], self._clock()
        known = self._work[process].get(work_id)
        num_counted = 0 if known is None else known.amount
        waits = _waits(limits, usage, num_requests, num_counted, now_s)
        limit = max(waits, key=lambda name: waits[name], default=None)
        if limit is not None and waits[limit]:
            self.release(process, work_id)
            return self._refused(tenant, limit, waits[limit])
        self._replace(process, work_id, _Work(usage, "requests", num_requests))
        usage.requests.add(num_requests - num_counted, now_s)
        return Admitted(_rates(limits, usage, now_s), limits)

    def admit_upload(self, process: str, work_id: int, tenant: str, num_bytes: int) -> Admitted | Refused:
        """Count an upload and its bytes, as far as their number is known."""
        limits, usage = self._limits_of(tenant), self._usage[tenant]
        if limits.max_uploads is not None and usage.num_uploads >= limits.max_uploads:
            return self._refused(tenant, "max_uploads", RETRY_S)
        self._replace(process, work_id, _Work(usage, "upload", num_bytes))
        return Admitted(Rates(), limits)

    def grow_upload(self, process: str, work_id: int, num_bytes: int) -> int:
        """Count further bytes of an upload; return the bytes of the tenant's others.

        Raises:
            QueueFull: it is not counted any more.
        """
        work = self._work[process].get(work_id)
        if work is None:
            raise QueueFull("the upload is not counted any more: send it again")
        work.count(-1)
        num_others, work.amount = work.usage.upload_bytes, work.amount + num_bytes
        work.count(1)
        return num_others

    def count_tokens(self, tenant: str, num_tokens: int) -> None:
        """Count tokens of prompts or outputs."""
        self._usage[tenant].tokens.add(num_tokens, self._clock())

    def release(self, process: str, work_id: int) -> None:
        """End work; no effect if it has ended."""
        work = self._work[process].pop(work_id, None)
        if work is not None:
            work.count(-1)

    def free(self, process: str) -> None:
        """End the work of a process that has died. What it used in the last minute stays."""
        for work in self._work.pop(process, {}).values():
            work.count(-1)

    def usage(self, tenant: str) -> Usage:
        """Return a tenant's limits and its usage."""
        usage, now_s = self._usage[tenant], self._clock()
        num_requests, num_tokens = usage.requests.used(now_s), usage.tokens.used(now_s)
        return Usage(self._limits_of(tenant), num_requests, num_tokens, usage.num_running, usage.num_uploads)

    def _forget_idle(self) -> None:
        """Forget tenants without usage, once a minute: they may be many, and come once."""
        now_s = self._clock()
        if now_s - self._swept_at < WINDOW_S:
            return
        self._swept_at = now_s
        for tenant in [tenant for tenant, usage in self._usage.items() if usage.is_idle(now_s)]:
            del self._usage[tenant]

    def _replace(self, process: str, work_id: int, work: _Work) -> None:
        self.release(process, work_id)
        self._work[process][work_id] = work
        work.count(1)

    def _refused(self, tenant: str, limit: str, wait_s: float) -> Refused:
        limits = self._limits_of(tenant)
        rates, most = _rates(limits, self._usage[tenant], self._clock()), getattr(limits, limit)
        allowed = f"tenant {tenant!r} may {ALLOWED[limit].format(most, '' if most == 1 else 's')}"
        if math.isinf(wait_s):
            return Refused(rates, limit, f"{allowed}, and this call alone is more: send a smaller one", None)
        retry_after_s = max(1, math.ceil(wait_s))
        return Refused(rates, limit, f"{allowed}: send this one again in {retry_after_s} s", retry_after_s)


def _waits(
    limits: TenantLimits, usage: _TenantUsage, num_requests: int, num_counted: int, now_s: float
) -> dict[str, float]:
    """Return how long each limit keeps the requests of a call out, of which `num_counted` count already.

    All of them count again when the call is sent again. Infinite is a call that never fits.
    """
    waits: dict[str, float] = {}
    num_further = num_requests - num_counted
    if (limit := limits.requests_per_minute) is not None:
        if num_requests > limit:
            waits["requests_per_minute"] = math.inf
        elif usage.requests.used(now_s) + num_further > limit:
            waits["requests_per_minute"] = usage.requests.wait_s(limit, num_requests, now_s)
    if (limit := limits.tokens_per_minute) is not None:
        waits["tokens_per_minute"] = usage.tokens.wait_s(limit, 1, now_s)
    if (limit := limits.max_running) is not None:
        if num_requests > limit:
            waits["max_running"] = math.inf
        elif usage.num_running + num_further > limit:
            waits["max_running"] = RETRY_S
    return waits


def _rates(limits: TenantLimits, usage: _TenantUsage, now_s: float) -> Rates:
    return Rates(
        _rate(limits.requests_per_minute, usage.requests, now_s),
        _rate(limits.tokens_per_minute, usage.tokens, now_s),
    )


def _rate(limit: int | None, window: SlidingWindow, now_s: float) -> Rate | None:
    if limit is None:
        return None
    return Rate(limit, max(0, limit - window.used(now_s)), window.wait_s(limit, limit, now_s))
