"""The seconds that an event loop and its threads spend for each tenant, and the turns in which requests begin by them.

A request has an `Account`. Tasks that it starts inherit it, and each of their steps is charged to it, if the event loop
makes its tasks with `timed_task`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator, Hashable, Iterable
from contextvars import Context, ContextVar
from dataclasses import dataclass
from functools import wraps
from types import CoroutineType
from typing import Any, ParamSpec, TypeVar

from server.metrics.instruments import Counter, Metric

P = ParamSpec("P")
R = TypeVar("R")

# The owner of requests and connections whose callers have shown no valid key, where tenants have keys.
NOBODY = ""
# The owner of their questions whether the server is well, which have a part of their own. No tenant has this name.
PROBES = "-"
WITHOUT_KEY = (NOBODY, PROBES)
# The seconds of a tenant are those of the last window. So no debt is older than two of them.
WINDOW_S = 1.0
# Each of these owners has at most this part of the event loop's time, also if nothing else wants it.
PART_WITHOUT_KEY = 0.2
# Until requests that have no time left are looked at again.
PAUSE_S = 0.01

Headers = Iterable[tuple[bytes, bytes]]


class LoopLedger:
    """The seconds of one event loop by tenant, in a window that slides. Use it on the event loop only.

    The last window counts by the part of it that is not over yet, as rate limiters with a sliding window count. A
    tenant without seconds in two windows is forgotten.

    Args:
        total: the metric of all seconds, with the labels `tenant` and `kind`.
        clock: by which the window slides.
    """

    def __init__(self, total: Metric[Counter], clock: Callable[[], float] = time.monotonic) -> None:
        self.total = total
        self._clock = clock
        self._began = clock()
        self._now: dict[str, float] = {}
        self._before: dict[str, float] = {}

    def charge(self, tenant: str, seconds: float) -> None:
        """Add the seconds of a piece of work; a clock that was set back adds none."""
        if not 0.0 <= self._clock() - self._began < WINDOW_S:
            self.slide()
        if seconds > 0.0:
            self._now[tenant] = self._now.get(tenant, 0.0) + seconds

    def used(self, tenant: str) -> float:
        """Return the seconds of a tenant in the last window."""
        left = 1.0 - self.slide() / WINDOW_S
        return self._now.get(tenant, 0.0) + left * self._before.get(tenant, 0.0)

    def used_on_threads(self, tenant: str) -> float:
        """Return all processor seconds that threads have worked for a tenant."""
        return self.total.labels(tenant, "thread").value

    def has_time(self, tenant: str) -> bool:
        """True for a tenant, and for callers without a valid key until they have had their part."""
        return tenant not in WITHOUT_KEY or self.used(tenant) < PART_WITHOUT_KEY * WINDOW_S

    def least_used(self, tenants: Iterable[str]) -> str | None:
        """Return the tenant with the fewest seconds of those that have time; None if none has."""
        left = 1.0 - self.slide() / WINDOW_S
        with_time = filter(self.has_time, tenants)
        return min(
            with_time,
            key=lambda each: self._now.get(each, 0.0) + left * self._before.get(each, 0.0),
            default=None,
        )

    def has_others(self, tenant: str) -> bool:
        """True if another tenant with a key had seconds in this window or the one before it."""
        self.slide()
        return any(
            other not in (tenant, *WITHOUT_KEY) for window in (self._now, self._before) for other in window
        )

    def slide(self) -> float:
        """Begin a new window when it is time, and count the seconds of the one that ends. Return the new one's age."""
        now = self._clock()
        age = now - self._began
        if 0.0 <= age < WINDOW_S:
            return age
        for tenant, seconds in self._now.items():
            self.total.labels(NOBODY if tenant == PROBES else tenant, "loop").inc(seconds)
        is_next = 0.0 <= age < 2 * WINDOW_S
        self._now, self._before = {}, self._now if is_next else {}
        # The clock may have jumped, or nothing was charged for long.
        self._began = self._began + WINDOW_S if is_next else now
        return now - self._began


@dataclass(slots=True)
class Account:
    """The tenant of one request, NOBODY until it is known, and the ledger of the event loop that serves it."""

    ledger: LoopLedger
    tenant: str


_current: ContextVar[Account | None] = ContextVar("account", default=None)


def start_charged(account: Account, start: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function whose tasks are charged to an account, and theirs."""
    token = _current.set(account)
    try:
        return start(*args, **kwargs)
    finally:
        _current.reset(token)


def timed_task(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, R] | Generator[Any, None, R],
    context: Context | None = None,
) -> asyncio.Task[R]:
    """Make a task whose steps are charged to the account of its context. A task factory for `asyncio`."""
    account = _current.get() if context is None else context.get(_current)
    # The first is quick, and true of nearly all.
    if account is not None and (type(coroutine) is CoroutineType or isinstance(coroutine, Coroutine)):
        coroutine = _Timed(coroutine, account)
    return asyncio.Task(coroutine, loop=loop, context=context)


class _Timed(Coroutine[Any, Any, R]):
    """A coroutine whose steps are charged to an account. In all else it is the one inside."""

    __slots__ = ("_account", "_coroutine")

    def __init__(self, coroutine: Coroutine[Any, Any, R], account: Account) -> None:
        self._coroutine = coroutine
        self._account = account

    def send(self, value: Any) -> Any:
        begun = time.thread_time()
        try:
            return self._coroutine.send(value)
        finally:
            self._account.ledger.charge(self._account.tenant, time.thread_time() - begun)

    def throw(self, *error: Any) -> Any:
        begun = time.thread_time()
        try:
            return self._coroutine.throw(*error)
        finally:
            self._account.ledger.charge(self._account.tenant, time.thread_time() - begun)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, R]:
        return self._coroutine.__await__()

    def __getattr__(self, name: str) -> Any:
        # Its name and its frame, by which asyncio and anyio tell of it and whether it has begun.
        return getattr(self._coroutine, name)


def timed_on_thread(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that charges the processor time of its thread to the account of the caller of this one."""
    account = _current.get()
    if account is None:
        return function

    @wraps(function)
    def timed(*args: P.args, **kwargs: P.kwargs) -> R:
        begun = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            account.ledger.total.labels(account.tenant, "thread").inc(max(time.thread_time() - begun, 0.0))

    return timed


class Turns:
    """The order in which the requests of an event loop begin. Use it on the event loop only.

    While several tenants are served, one request begins in each turn of the loop, the first of the tenant with the
    fewest seconds. So a request waits for no tenant that had more, and what is read between two turns is seen. The
    requests of one tenant alone begin at once, those of callers without a valid key one in a turn and while
    they have time.

    Args:
        ledger: the seconds of the tenants.
        owner_of: returns the tenant of a head's key, if it is known and valid, and NOBODY otherwise.
    """

    def __init__(self, ledger: LoopLedger, owner_of: Callable[[Headers], str]) -> None:
        self.ledger = ledger
        self.owner_of = owner_of
        # The owner of a connection before its first head.
        self.first_owner = owner_of(())
        self._waiting: dict[str, dict[Hashable, Callable[[], None]]] = {}
        # A request has begun in this turn of the loop, or may begin in the next.
        self._is_scheduled = False
        self._pausing: asyncio.TimerHandle | None = None

    def begin(self, key: Hashable, tenant: str, start: Callable[[], None]) -> bool:
        """Start a request now, and return True, or in its turn, unless `leave` is called with the key before."""
        if tenant not in (*WITHOUT_KEY, *self._waiting) and not self.ledger.has_others(tenant):
            start()
            return True
        has_time = self.ledger.has_time(tenant)
        if has_time and not self._is_scheduled:
            self._begin(start)
            return True
        self._waiting.setdefault(tenant, {})[key] = start
        if not has_time:
            self._pause()
        return False

    def leave(self, key: Hashable, tenant: str) -> None:
        """Forget a request that waits; no effect if it does not."""
        waiting = self._waiting.get(tenant, {})
        waiting.pop(key, None)
        if not waiting:
            self._waiting.pop(tenant, None)

    def _begin(self, start: Callable[[], None]) -> None:
        self._is_scheduled = True
        asyncio.get_running_loop().call_soon(self._turn)
        start()

    def _turn(self) -> None:
        """Start the request whose turn it is."""
        self._is_scheduled = False
        tenant = self.ledger.least_used(self._waiting)
        if tenant is not None:
            key, start = next(iter(self._waiting[tenant].items()))
            self.leave(key, tenant)
            self._begin(start)
        elif self._waiting:
            self._pause()

    def _pause(self) -> None:
        if self._pausing is None:
            self._pausing = asyncio.get_running_loop().call_later(PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._pausing = None
        if not self._is_scheduled:
            self._turn()
