"""Calls of a registry with a deadline, on threads of their own, and whether its volume or bucket answers.

A call that is late fails alone, since it may be one tenant's. Only a probe, which asks for nothing that a tenant owns,
tells that a volume hangs, such as an NFS mount whose server is away: then all calls fail at once until a probe is
answered. Threads of calls are divided among tenants.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager
from contextvars import copy_context
from functools import partial
from pathlib import Path, PurePath
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

import anyio

from deltastore.errors import PeraxisError, RegistryUnavailable, RegistryUnwritable
from deltastore.registry import Registry
from deltastore.registry.claims import is_bucket
from deltastore.registry.object_cache import ObjectCache
from deltastore.threads import NICENESS, lower_thread_priority
from deltastore.user_cache import user_cache_dir
from server.errors import QueueFull
from server.fairness import FairBudget, FairLimiter
from server.settings import Settings
from server.tenants.loop_ledger import timed_on_thread

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

# A call that takes longer is late.
CALL_S = 2.0
# The same of calls that may read or write thousands of files.
LONG_CALL_S = 30.0
# Calls at a time of each kind, those that are late left out; a tenant has at most half of them, and one list at a time.
NUM_CALLS = 16
# Threads that late calls may hold in addition. Each tenant's late calls hold at most half of those that are left.
MAX_LATE = 64
# Calls of one tenant that wait. About as many as a process has connections.
MAX_WAITING = 4096
# A late call is made again after this time, when the volume answers other calls.
KEY_S = 60.0
# Between two probes of a volume that answers, and of one that does not or that a call gives a reason to doubt.
PROBE_S = 5.0
RETRY_S = 0.5
# Probes that hang, each on a thread. More than one, since a volume that was mounted anew answers only new calls.
NUM_PROBES = 8
NEW_PROBE_S = 10.0
# The share of the server's own calls. No tenant has this name.
SERVER = ""


class RegistryCalls:
    """The calls of one process. Event loop only.

    Args:
        where: the registry, for messages to operators.
        probe: reads a little of the registry that no tenant owns; raises RegistryUnavailable if it cannot be read, and
            RegistryUnwritable if it can only be read.
        deadline_s: of short calls.
    """

    def __init__(self, where: str, probe: Callable[[], object], deadline_s: float = CALL_S) -> None:
        self._where = where
        self._kind = "bucket" if is_bucket(where) else "volume"
        self._probe = probe
        self._deadline_s = deadline_s
        self._short = _Threads("registry", deadline_s)
        self._long = _Threads("registry-long", max(LONG_CALL_S, deadline_s))
        # With a bucket, a call has threads of its own for its readings.
        clock = time.monotonic if is_bucket(where) else time.thread_time
        self._lists = _PacedThreads("registry-lists", max(LONG_CALL_S, deadline_s), clock)
        self._probes = DaemonThreads(NUM_PROBES, "registry-probe")
        self._late_keys: dict[Hashable, float] = {}  # with the time since which they are late
        self._hang = asyncio.Event()
        self._deadlines: set[asyncio.Timeout] = set()  # of the calls that are waited for
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failure: RegistryUnavailable | None = None
        self._logged = ("", 0.0)  # the last failure of a call that was logged, and when
        self._unwritable: RegistryUnwritable | None = None
        # Set when a call gives a reason to probe.
        self._is_in_doubt = asyncio.Event()

    @property
    def failure(self) -> RegistryUnavailable | None:
        """The reason for which the registry cannot be read now; None while it can."""
        return self._failure

    @property
    def unwritable(self) -> RegistryUnwritable | None:
        """The reason for which the registry could not be written at the last probe that could read it, or None."""
        return self._unwritable

    async def run(self, function: Callable[[], R], tenant: str | None, key: Hashable = None) -> R:
        """Make a short call, such as a resolution.

        Args:
            tenant: the tenant whose share of the threads it takes; None for calls of the server's own.
            key: calls of one key are not made while one of them is late; None is no key.

        Raises:
            RegistryUnavailable: the volume fails or hangs, or the call is late. A change may still be made later.
            QueueFull: the tenant has too many calls that wait or that are late.
        """
        return await self._run(self._short, function, tenant, key)

    async def run_long(self, function: Callable[[], R], tenant: str | None, key: Hashable = None) -> R:
        """Make a call that may read or write thousands of files; otherwise as `run`."""
        return await self._run(self._long, function, tenant, key)

    async def run_list(self, function: Callable[[], R], tenant: str | None) -> R:
        """Make a call that reads many files, for a page of a list, in turn with the tenant's others and with rests.

        Raises as `run` does.
        """
        try:
            async with self._lists.turn(tenant or SERVER):
                return await self._run(self._lists, function, tenant, None)
        except TimeoutError as error:
            raise self._late(self._lists.deadline_s) from error
        except QueueFull as error:
            raise self._refused(error) from error

    async def unless_hanging(self, work: Coroutine[Any, Any, R]) -> R:
        """Await work that uses threads of its own, such as an upload. Leave it to end by itself if the volume hangs.

        Raises:
            RegistryUnavailable: the volume hangs. The work was cancelled, and cleans up when the volume answers.
        """
        if self._hang.is_set():
            work.close()
            raise self._hanging()
        task, hanging = asyncio.create_task(work), asyncio.create_task(self._hang.wait())
        # A task that nothing refers to may be collected.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await asyncio.wait({task, hanging}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task, hanging}, return_when=asyncio.FIRST_COMPLETED)
            raise
        finally:
            hanging.cancel()
        task.add_done_callback(_retrieved)
        task.cancel()
        raise self._hanging()

    def check(self) -> None:
        """Raise RegistryUnavailable if the registry cannot be read now. Makes no call."""
        if self._failure is not None:
            # A copy: an exception that is raised several times collects the tracebacks of all.
            raise RegistryUnavailable(str(self._failure), public=self._failure.public)

    async def watch(self) -> None:
        """Probe the registry until cancelled, and log each change of whether it can be read."""
        while True:
            self._is_in_doubt.clear()
            await self._look()
            # Also in doubt: calls that are late give reasons as often as a tenant likes.
            await asyncio.sleep(RETRY_S)
            if self._failure is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PROBE_S - RETRY_S):
                        await self._is_in_doubt.wait()

    async def _look(self) -> None:
        """Probe until an answer or an error; what hangs is tried again on another thread."""
        probes = [asyncio.wrap_future(self._probes.submit(self._probe))]
        try:
            while True:
                is_last = len(probes) == NUM_PROBES
                timeout = self._deadline_s if len(probes) == 1 and not self._hang.is_set() else NEW_PROBE_S
                done, _ = await asyncio.wait(
                    probes, timeout=None if is_last else timeout, return_when=asyncio.FIRST_COMPLETED
                )
                if done:
                    self._probed(done.pop())
                    return
                self._hangs()
                probes.append(asyncio.wrap_future(self._probes.submit(self._probe)))
        finally:
            for probe in probes:
                probe.add_done_callback(_retrieved)
                probe.cancel()

    def _probed(self, probe: asyncio.Future[object]) -> None:
        error = probe.exception()
        if isinstance(error, RegistryUnavailable):
            self._fails(error)
        elif error is not None and not isinstance(error, PeraxisError):
            what = f"{type(error).__name__}: {error}"
            self._fails(
                RegistryUnavailable(
                    f"{self._where} cannot be probed: {what}",
                    public="the registry cannot be read: ask its operator to check it, and try again",
                )
            )
        else:
            # Also after an error of one file: the volume has answered.
            self._works()
            self._may_be_written(error if isinstance(error, RegistryUnwritable) else None)

    async def _run(
        self, threads: _Threads, function: Callable[[], R], tenant: str | None, key: Hashable
    ) -> R:
        if self._hang.is_set():
            raise self._hanging()
        if time.monotonic() - self._late_keys.get(key, float("-inf")) < KEY_S:
            raise self._late(threads.deadline_s)
        share, call = tenant or SERVER, None
        try:
            async with self._deadline(threads.deadline_s), threads.permits.permit(share):
                call = threads.submit(function if tenant is None else timed_on_thread(function), share)
                # Unlike awaiting it, this does not cancel it. A late call keeps its thread and not its permit.
                await asyncio.wait({call})
                return call.result()
        except TimeoutError as error:
            self._is_in_doubt.set()
            if call is not None and key is not None:
                self._late_keys[key] = time.monotonic()
                call.add_done_callback(lambda _: self._late_keys.pop(key, None))
            raise (self._hanging() if self._hang.is_set() else self._late(threads.deadline_s)) from error
        except QueueFull as error:
            raise self._refused(error) from error
        except RegistryUnavailable as error:
            self._is_in_doubt.set()
            self._log(error)
            raise

    def _log(self, error: RegistryUnavailable) -> None:
        """Log a call that failed though the registry answers: of one file, the watch knows nothing. Not each again."""
        message, now = str(error), time.monotonic()
        if self._failure is None and (message != self._logged[0] or now - self._logged[1] > KEY_S):
            self._logged = (message, now)
            log.error("a call of the registry failed: %s", message)

    def _refused(self, error: QueueFull) -> RegistryUnavailable:
        return RegistryUnavailable(f"{self._where}: {error}", public=str(error))

    @contextlib.asynccontextmanager
    async def _deadline(self, deadline_s: float) -> AsyncIterator[None]:
        """Raise TimeoutError from the block at a deadline, or when the volume is found to hang."""
        async with asyncio.timeout(deadline_s) as deadline:
            self._deadlines.add(deadline)
            try:
                yield
            finally:
                self._deadlines.discard(deadline)

    def _late(self, deadline_s: float) -> RegistryUnavailable:
        return RegistryUnavailable(
            f"{self._where} did not answer a call within {deadline_s:g} s: check the load on its {self._kind}",
            public=f"the registry did not answer within {deadline_s:g} s: try again; a change may still be made",
        )

    def _hanging(self) -> RegistryUnavailable:
        return RegistryUnavailable(
            f"{self._where} does not answer: check that the {self._kind} can be reached",
            public=f"the registry's {self._kind} does not answer: ask its operator to check it, and try again; "
            "a change may still be made when it answers",
        )

    def _hangs(self) -> None:
        self._hang.set()
        for deadline in self._deadlines:
            # One that has expired cannot be moved any more, and its call ends anyway.
            if not deadline.expired():
                deadline.reschedule(0)
        self._fails(self._hanging())

    def _fails(self, error: RegistryUnavailable) -> None:
        if self._failure is None or str(self._failure) != str(error):
            log.error("the registry cannot be read; what is in memory is served on: %s", error)
        self._failure = error

    def _works(self) -> None:
        if self._failure is not None:
            log.warning("the registry can be read again: %s", self._where)
        self._failure = None
        self._hang.clear()

    def _may_be_written(self, error: RegistryUnwritable | None) -> None:
        if error is not None and str(self._unwritable) != str(error):
            log.error("the registry cannot be written; all requests for tokens are served on: %s", error)
        elif error is None and self._unwritable is not None:
            log.warning("the registry can be written again: %s", self._where)
        self._unwritable = error


class _Threads:
    """The threads for calls of one kind, of which each tenant has a share. Event loop only."""

    def __init__(self, name: str, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.permits = FairLimiter(NUM_CALLS, NUM_CALLS // 2, MAX_WAITING)
        self._held = FairBudget(NUM_CALLS + MAX_LATE, "calls of its registry that are late")
        self._threads = DaemonThreads(NUM_CALLS + MAX_LATE, name)

    def submit(self, function: Callable[[], R], tenant: str) -> asyncio.Future[R]:
        """Call a function on a thread, which counts for the tenant until the function returns.

        Raises:
            QueueFull: the tenant holds too many threads by calls that have not returned.
        """
        self._held.take(tenant, 1)
        try:
            call = asyncio.wrap_future(self._threads.submit(function))
        except BaseException:
            self._held.give_back(tenant, 1)
            raise
        call.add_done_callback(_retrieved)
        call.add_done_callback(lambda _: self._held.give_back(tenant, 1))
        return call


class _PacedThreads(_Threads):
    """Threads that each tenant uses one after the other, with rests of the processor time that its last call took.

    So a tenant that calls all the time takes at most half of one processor, which it would else take from the engine.

    Args:
        name: of the threads.
        deadline_s: of a call, and of its turn before that.
        clock: the processor time of a call's thread, or the time that stands for it where a call has several threads.
    """

    def __init__(self, name: str, deadline_s: float, clock: Callable[[], float]) -> None:
        super().__init__(name, deadline_s)
        self._clock = clock
        self._turns = FairLimiter(sys.maxsize, 1, MAX_WAITING)
        self._running: dict[str, asyncio.Future[Any]] = {}
        self._rested_at: dict[str, float] = {}  # of tenants that have called

    def submit(self, function: Callable[[], R], tenant: str) -> asyncio.Future[R]:
        def timed() -> R:
            begin = self._clock()
            try:
                return function()
            finally:
                self._rested_at[tenant] = time.monotonic() + self._clock() - begin

        call = self._running[tenant] = super().submit(timed, tenant)
        call.add_done_callback(lambda _: self._running.pop(tenant))
        return call

    @contextlib.asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for the tenant's calls before, for those that are late too, and a rest; hold the turn inside the block.

        Raises:
            TimeoutError: they take too long.
            QueueFull: too many wait.
        """
        async with contextlib.AsyncExitStack() as held:
            async with asyncio.timeout(self.deadline_s):
                await held.enter_async_context(self._turns.permit(tenant))
                if tenant in self._running:
                    await asyncio.wait({self._running[tenant]})
                await asyncio.sleep(self._rested_at.get(tenant, 0.0) - time.monotonic())
            yield


class DaemonThreads:
    """At most `num_threads` threads for calls that may never return, each started when a call finds none idle.

    They are daemons, unlike those of `concurrent.futures` and anyio: the end of a process must not wait for a call that
    hangs.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._name = name
        self._works: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_started = 0
        self._num_unfinished = 0  # calls, those in the queue included

    def submit(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call a function on a thread. The future of a call that has not begun can be cancelled."""
        future: Future[R] = Future()
        # The thread's log lines name the caller's request.
        context = copy_context()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            with _ErrorsTo(future):
                future.set_result(context.run(function, *args, **kwargs))

        with self._lock:
            self._num_unfinished += 1
            must_start = self._num_started < min(self._num_unfinished, self._num_threads)
            self._num_started += must_start
        self._works.put(call)
        if must_start:
            name = f"{self._name}-{self._num_started}"
            threading.Thread(target=self._run, name=name, daemon=True).start()
        return future

    def _run(self) -> None:
        while True:
            call = self._works.get()
            call()
            # No reference to what was called while the thread is idle.
            del call
            with self._lock:
                self._num_unfinished -= 1


class _ErrorsTo(contextlib.AbstractContextManager[None], Generic[R]):
    """Gives an exception of its block to a future, as `concurrent.futures` does."""

    def __init__(self, future: Future[R]) -> None:
        self._future = future

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None:
            self._future.set_exception(error)
        return True


def _retrieved(done: asyncio.Future[R]) -> None:
    """Take note of an exception that may not be waited for any more."""
    if not done.cancelled():
        done.exception()


# In a registry's directory. What is published is written there.
WRITTEN = ("uploads", "variants")


def probe(registry: Registry) -> None:
    """Read the registry's own files, and check a directory's rights.

    Raises:
        RegistryUnavailable: the registry cannot be read.
        RegistryUnwritable: it is in a directory, can be read, and cannot be written.
    """
    registry.probe()
    # Only writing would tell the rights on a bucket.
    if isinstance(root := registry.files.root, Path):
        _check_writable(root)


def _check_writable(root: Path) -> None:
    """Raise RegistryUnwritable if the directory cannot be written. A full disk is none: smaller files may fit."""
    try:
        if os.statvfs(root).f_flag & os.ST_RDONLY:
            raise RegistryUnwritable(
                f"{root} is read-only: mount its volume for writing",
                public="read-only: uploads and changes are refused; ask its operator to mount its volume for writing",
            )
    except OSError as error:
        raise RegistryUnavailable(
            f"{root}: {error.strerror}: check its volume",
            public=f"the registry's volume failed: {error.strerror}: ask its operator to check it",
        ) from error
    for name in WRITTEN:
        if not os.access(root / name, os.W_OK | os.X_OK):
            raise RegistryUnwritable(
                f"{root / name} cannot be written: give the server's user the right to",
                public="not writable: uploads and changes are refused; ask its operator to check the rights on it",
            )


def free_bytes(root: PurePath) -> int | None:
    """Return how many bytes the registry's volume has room for; None if it is in a bucket.

    Raises:
        RegistryUnavailable: the volume cannot be asked.
    """
    if not isinstance(root, Path):
        return None
    try:
        volume = os.statvfs(root)
    except OSError as error:
        raise RegistryUnavailable(
            f"{root}: {error.strerror}: check its volume",
            public=f"the registry's volume failed: {error.strerror}: ask its operator to check it",
        ) from error
    return volume.f_bavail * volume.f_frsize


# In the user's cache directory.
CACHE = "registry"


def open_registry(settings: Settings, *, make: bool = True) -> Registry:
    """Open the registry; a bucket's objects are kept in the directory of `--registry-cache`.

    Args:
        settings: those of the server.
        make: create what is missing. Without it, the registry is neither read nor written now.

    Raises:
        UsageError: the location is malformed.
        RegistryError: the registry or the cache cannot be opened.
    """
    cache = None
    if is_bucket(settings.registry):
        cache = ObjectCache(_cache(settings), settings.registry_cache_bytes)
    return Registry.open(settings.registry, cache, make=make)


def _cache(settings: Settings) -> Path:
    return settings.registry_cache or user_cache_dir() / CACHE


class BackgroundThreads:
    """A number of threads that computing threads of the process and of its neighbours have priority over.

    Args:
        niceness: of the threads, above that of the process.
    """

    def __init__(self, num_threads: int, name: str, niceness: int = NICENESS) -> None:
        lower = partial(lower_thread_priority, niceness)
        self._threads = ThreadPoolExecutor(num_threads, name, initializer=lower)

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a function on one of the threads. A cancelled caller still waits until it has ended."""
        # The thread's log lines name the caller's request.
        call = partial(copy_context().run, timed_on_thread(function), *args, **kwargs)
        # Starlette cancels a request's task repeatedly; the scope and the shield make it wait for the thread.
        with anyio.CancelScope(shield=True):
            work = asyncio.get_running_loop().run_in_executor(self._threads, call)
            try:
                result = await asyncio.shield(work)
            except asyncio.CancelledError:
                await asyncio.wait({work})
                raise
        return result

    @asynccontextmanager
    async def entered(self, manager: AbstractContextManager[R]) -> AsyncIterator[R]:
        """Enter and leave a context manager on a thread; a caller that is cancelled meanwhile leaves it, too."""
        entering = asyncio.ensure_future(self.run(manager.__enter__))
        try:
            with anyio.CancelScope(shield=True):
                entered = await asyncio.shield(entering)
            yield entered
        finally:
            with anyio.CancelScope(shield=True):
                await asyncio.wait({entering})
                if not entering.cancelled() and entering.exception() is None:
                    await self.run(manager.__exit__, None, None, None)
