"""Calls of a registry with a deadline, and whether its volume or bucket answers.

A volume that hangs, such as an NFS mount whose server is away, holds the threads of the calls that it has, and nothing
else: further calls fail at once until a probe is answered. Must not know what the calls do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Hashable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from deltastore.errors import PeraxisError, RegistryUnavailable, RegistryUnwritable
from server.volume.threads import DaemonThreads

log = logging.getLogger(__name__)

R = TypeVar("R")

# A call that takes longer is late, and the volume hangs.
CALL_S = 2.0
# The same of calls that may read or write thousands of files.
LONG_CALL_S = 30.0
NUM_THREADS = 8
NUM_LONG_THREADS = 8
# Threads that late calls may hold beside these. Calls fail at once when they do.
MAX_LATE = 64
# A late call is made again after this time, when the volume answers other calls.
KEY_S = 60.0
# Between two probes of a volume that answers, and of one that does not.
PROBE_S = 5.0
RETRY_S = 0.5
# Probes that hang, each on a thread. More than one, since a volume that was mounted anew answers only new calls.
NUM_PROBES = 8
NEW_PROBE_S = 10.0


class RegistryCalls:
    """The calls of one process. Event loop only.

    Args:
        where: the registry, for messages to operators.
        probe: reads a little of the registry, as a request does; raises RegistryUnavailable if it cannot be read, and
            RegistryUnwritable if it can only be read.
        deadline_s: of short calls.
    """

    def __init__(self, where: str, probe: Callable[[], object], deadline_s: float = CALL_S) -> None:
        self._where = where
        self._probe = probe
        self._deadline_s = deadline_s
        self._short = DaemonThreads(NUM_THREADS, "registry")
        self._long = DaemonThreads(NUM_LONG_THREADS, "registry-long")
        self._probes = DaemonThreads(NUM_PROBES, "registry-probe")
        self._late: dict[DaemonThreads, int] = {self._short: 0, self._long: 0}
        self._late_keys: dict[Hashable, float] = {}  # with the time since which they are late
        self._hang = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failure: RegistryUnavailable | None = None
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

    async def run(self, function: Callable[[], R], key: Hashable = None) -> R:
        """Make a short call, such as a resolution.

        Args:
            key: calls of one key are not made while one of them is late; None is no key.

        Raises:
            RegistryUnavailable: the volume hangs, or fails in the call. A change may still be made later.
        """
        return await self._run(self._short, self._deadline_s, function, key)

    async def run_long(self, function: Callable[[], R], key: Hashable = None) -> R:
        """Make a call that may read or write thousands of files; otherwise as `run`."""
        return await self._run(self._long, max(LONG_CALL_S, self._deadline_s), function, key)

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
            await self._look()
            self._is_in_doubt.clear()
            if self._failure is not None:
                await asyncio.sleep(RETRY_S)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROBE_S):
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
            raise error
        else:
            # Also after an error of one file: the volume has answered.
            self._works()
            self._may_be_written(error if isinstance(error, RegistryUnwritable) else None)

    async def _run(
        self, threads: DaemonThreads, deadline_s: float, function: Callable[[], R], key: Hashable
    ) -> R:
        if self._hang.is_set() or self._late[threads] >= MAX_LATE or not self._may_call(key):
            raise self._hanging()
        call = threads.submit(function)
        waiting = asyncio.wrap_future(call)
        waiting.add_done_callback(_retrieved)
        end = time.monotonic() + deadline_s
        while not waiting.done() and (left_s := end - time.monotonic()) > 0:
            await asyncio.wait({waiting}, timeout=min(left_s, self._deadline_s))
            if self._hang.is_set():
                # Others have found out meanwhile.
                break
        if not waiting.done():
            # A call that waits for a thread behind others says nothing about the volume.
            if call.running():
                self._is_late(threads, call, key)
            call.cancel()
            raise self._hanging()
        try:
            return waiting.result()
        except RegistryUnavailable:
            self._is_in_doubt.set()
            raise

    def _may_call(self, key: Hashable) -> bool:
        return time.monotonic() - self._late_keys.get(key, float("-inf")) >= KEY_S

    def _is_late(self, threads: DaemonThreads, call: Future[R], key: Hashable) -> None:
        """Keep account of a late call until it returns."""
        loop = asyncio.get_running_loop()
        self._late[threads] += 1
        # It may never return, as on a volume that was unmounted while in use, and the next calls need its thread.
        threads.num_threads += 1
        if key is not None:
            self._late_keys[key] = time.monotonic()
        self._hangs()

        def returned(_: Future[R]) -> None:
            # The process may have ended its work meanwhile.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(partial(self._returned, threads, key))

        call.add_done_callback(returned)

    def _returned(self, threads: DaemonThreads, key: Hashable) -> None:
        self._late[threads] -= 1
        threads.num_threads -= 1
        self._late_keys.pop(key, None)
        self._is_in_doubt.set()

    def _hanging(self) -> RegistryUnavailable:
        return RegistryUnavailable(
            f"{self._where} does not answer: check that its volume or bucket can be reached",
            public="the registry's volume does not answer: ask its operator to check it, and try again; "
            "a change may still be made when it answers",
        )

    def _hangs(self) -> None:
        self._hang.set()
        self._is_in_doubt.set()
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


def _retrieved(done: asyncio.Future[R]) -> None:
    """Take note of an exception that may not be waited for any more."""
    if not done.cancelled():
        done.exception()
