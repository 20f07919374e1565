"""The engine: the one thread that owns the model. Takes requests from any thread, answers through their `on_event`.

It runs one request at a time, a token per turn of its loop; between tokens it takes new calls and makes finished loads
visible, so a variant that loads delays nobody. `Generation` is a request while it runs.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from deltastore.base import Base
from deltastore.errors import PeraxisError
from deltastore.records import VersionRecord
from server.deltas.residency import Residency, label
from server.engine.generation import Generation
from server.engine.request import DoneEvent, ErrorEvent, FinishEvent, Request, Timings
from server.engine.runner import Runner
from server.engine.telemetry import Telemetry
from server.engine.waiting import Prefetch, Unload, Waiting
from server.errors import Draining, EngineFailed, InvalidRequest, LoadTimeout, QueueFull

IDLE_S = 0.2  # how long the loop sleeps when nothing happens
STUCK_S = 60.0  # a thread that has not come round for so long is not alive

logger = logging.getLogger("peraxis.engine")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine admits."""

    max_queue: int  # requests waiting, beside the running one
    load_timeout_s: float
    max_model_len: int  # tokens of prompt and output together


class Engine:
    """See the module. Public methods may be called from any thread."""

    def __init__(
        self, runner: Runner, residency: Residency, base: Base, telemetry: Telemetry, limits: Limits
    ) -> None:
        self.base = base
        self.limits = limits
        self.on_lost: Callable[[], None] = lambda: None  # called when the device itself is gone
        self._runner = runner
        self._residency = residency
        self._telemetry = telemetry
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: dict[str, Request] = {}  # admitted and not answered, by id
        self._cancelled: set[str] = set()
        self._draining = self._stopping = False
        self._beat = time.monotonic()
        self._waiting: list[Waiting] = []
        self._prefetches: list[Prefetch] = []
        self._unloads: list[Unload] = []
        self._running: tuple[Waiting, Generation] | None = None
        self._started_at = 0.0
        residency.on_finished = lambda: self._calls.put(lambda: None)
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Admit a request.

        Raises:
            InvalidRequest: what it asks cannot be served.
            QueueFull, Draining: it may come again later.
        """
        try:
            request.check(self.limits.max_model_len)
            with self._lock:
                if self._draining or not self._thread.is_alive():
                    raise Draining("the server is shutting down: send the request to another replica")
                if len(self._open) > self.limits.max_queue:
                    raise QueueFull(f"{len(self._open)} requests are in the queue: try again in a moment")
                if request.id in self._open:
                    raise InvalidRequest(f"request id {request.id!r} is in use: choose another")
                self._open[request.id] = request
        except PeraxisError as error:
            self._telemetry.rejected(error)
            raise
        self._calls.put(lambda: self._admit(request))

    def cancel(self, request_id: str) -> None:
        """End a request whose client is gone; unknown ids are ignored."""
        self._calls.put(lambda: self._cancelled.add(request_id))

    def load(self, record: VersionRecord, *, pin: bool = False) -> Future[None]:
        """Bring a version into a slot (and keep it there, with `pin`); done when it is visible."""
        future: Future[None] = Future()
        self._calls.put(lambda: self._prefetches.append(Prefetch(record, pin, future)))
        return future

    def pin(self, record: VersionRecord) -> Future[None]:
        """Load a version and never evict it."""
        return self.load(record, pin=True)

    def unpin(self, record: VersionRecord) -> Future[None]:
        """Let a version be evicted again."""
        return self._call(lambda: self._residency.unpin(record.digest))

    def unload(self, record: VersionRecord) -> Future[None]:
        """Free a version's slot as soon as nobody runs on it; done when it has happened."""
        future: Future[None] = Future()
        self._calls.put(lambda: self._unloads.append(Unload(record.digest, future)))
        return future

    def level_of(self, digest: str) -> str:
        """Where a version is now: ``gpu`` or ``disk``."""
        return self._residency.level_of(digest)

    def is_pinned(self, digest: str) -> bool:
        return self._residency.is_pinned(digest)

    def in_use(self, digest: str) -> int:
        """How many admitted requests of a digest have not been answered in full."""
        with self._lock:
            return sum(request.digest == digest for request in self._open.values())

    @property
    def max_model_len(self) -> int:
        return self.limits.max_model_len

    @property
    def slot_bytes(self) -> int:
        return self._residency.slot_bytes

    def alive(self) -> bool:
        """Whether the engine's thread still comes round."""
        return not self._stopping and self._thread.is_alive() and time.monotonic() - self._beat < STUCK_S

    def drain(self) -> None:
        """Refuse new requests from now on."""
        with self._lock:
            self._draining = True

    def close(self, timeout_s: float = 0.0) -> None:
        """Refuse new requests, let the admitted ones end for up to `timeout_s`, then stop the thread."""
        self.drain()
        deadline = time.monotonic() + timeout_s
        while self._open and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        self._stopping = True
        self._thread.join(STUCK_S)
        self._residency.close()

    def _call(self, function: Callable[[], None]) -> Future[None]:
        """Run a function on the engine's thread."""
        future: Future[None] = Future()

        def run() -> None:
            try:
                function()
            except PeraxisError as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        self._calls.put(run)
        return future

    def _loop(self) -> None:
        """Turn until told to stop. Whatever else ends it, nobody is left waiting, and the service hears of it."""
        told_to_stop = False
        try:
            while not self._stopping:
                self._turn()
            told_to_stop = True
        finally:
            self._stopping = True
            self.drain()
            self._fail_all(Draining("the server has shut down: send the request again"))
            if not told_to_stop:
                self.on_lost()

    def _turn(self) -> None:
        self._beat = time.monotonic()
        self._take_calls()
        self._adopt_loads()
        self._drop_cancelled()
        self._place_deltas()
        self._unload_idle()
        self._start_next()
        if self._running is not None:
            self._step(*self._running)

    def _take_calls(self) -> None:
        """Every call that waits; with nothing to run, sleep until one comes."""
        busy = self._running is not None or not self._calls.empty()
        try:
            call = self._calls.get(timeout=0.0 if busy else IDLE_S)
            while True:
                call()
                call = self._calls.get_nowait()
        except queue.Empty:
            return

    def _admit(self, request: Request) -> None:
        waiting = Waiting(request)
        if request.digest is not None:
            waiting.cold = self._residency.find(request.digest) is None
        self._telemetry.admitted(request, resident=not waiting.cold)
        self._waiting.append(waiting)

    def _adopt_loads(self) -> None:
        for adopted in self._residency.adopt():
            for waiting in [w for w in self._waiting if w.request.digest == adopted.record.digest]:
                if adopted.error is not None:
                    self._fail(waiting, adopted.error)
            for prefetch in [p for p in self._prefetches if p.record.digest == adopted.record.digest]:
                if adopted.error is not None:
                    self._prefetches.remove(prefetch)
                    prefetch.future.set_exception(adopted.error)

    def _place_deltas(self) -> None:
        """Hold the slot of every waiting request whose delta is there; then begin loads for the others in order."""
        now = time.monotonic()
        absent = [w for w in self._waiting if w.request.record is not None and w.delta is None]
        for waiting in absent:
            waiting.delta = self._residency.find(waiting.request.digest or "")
            if waiting.delta is not None:
                self._residency.retain(waiting.delta)
                waiting.loaded_at = now if waiting.cold else None
        for waiting in absent:
            record = waiting.request.record
            if record is None or waiting.delta is not None:
                continue
            waiting.cold = True
            if now - waiting.admitted_at > self.limits.load_timeout_s:
                self._fail(waiting, _load_timeout(record, self.limits.load_timeout_s))
            else:
                self._residency.load(record)
        for prefetch in list(self._prefetches):
            self._prefetch(prefetch, now)

    def _prefetch(self, prefetch: Prefetch, now: float) -> None:
        digest, timeout = prefetch.record.digest, self.limits.load_timeout_s
        if self._residency.find(digest) is None and now - prefetch.since <= timeout:
            self._residency.load(prefetch.record)
            return
        self._prefetches.remove(prefetch)
        try:
            if self._residency.find(digest) is None:
                raise _load_timeout(prefetch.record, timeout)
            if prefetch.pin:
                self._residency.pin(digest)
            prefetch.future.set_result(None)
        except PeraxisError as error:
            prefetch.future.set_exception(error)

    def _unload_idle(self) -> None:
        for unload in [u for u in self._unloads if self._residency.evict(u.digest, "unload")]:
            self._unloads.remove(unload)
            unload.future.set_result(None)

    def _start_next(self) -> None:
        """The oldest request that has all it needs runs next."""
        if self._running is None:
            ready = next((w for w in self._waiting if w.request.record is None or w.delta is not None), None)
            if ready is not None:
                self._attempt(ready, lambda: self._start(ready))
        loading = [w.request.record is not None and w.delta is None for w in self._waiting]
        self._telemetry.queues(int(self._running is not None), loading)

    def _start(self, waiting: Waiting) -> None:
        self._started_at = time.monotonic()
        generation = Generation(waiting.request, waiting.delta, self._runner)
        self._waiting.remove(waiting)
        self._running = waiting, generation

    def _attempt(self, waiting: Waiting, action: Callable[[], None]) -> bool:
        """Do something for one request; whatever goes wrong fails that request alone."""
        try:
            action()
        except PeraxisError as error:
            self._fail(waiting, error)
        except Exception as error:
            logger.exception("step failed for request %s", waiting.request.id)
            self._fail(waiting, EngineFailed(f"the step failed: {type(error).__name__}: {error}"))
            if not self._runner.is_usable():
                self._stopping = True
                self.on_lost()
        else:
            return True
        return False

    def _step(self, waiting: Waiting, generation: Generation) -> None:
        """One token of the running request."""
        began, before = time.monotonic(), generation.last_token_at
        if self._attempt(waiting, generation.step):
            self._telemetry.step(time.monotonic() - began, int(generation.delta is not None))
            if before is None:
                self._telemetry.first_token(waiting.request, self._timings(waiting, generation))
            elif generation.last_token_at is not None:
                self._telemetry.next_token(generation.last_token_at - before)
            if generation.done:
                self._finish(waiting, generation, generation.reason)

    def _drop_cancelled(self) -> None:
        for waiting in [w for w in self._waiting if w.request.id in self._cancelled]:
            waiting.request.on_event(FinishEvent(0, "cancelled", ""))
            self._finish(waiting, None, "cancelled")
        if self._running is not None and self._running[0].request.id in self._cancelled:
            waiting, generation = self._running
            if self._attempt(waiting, lambda: generation.finish_sample("cancelled")):
                self._finish(waiting, generation, "cancelled")
        self._cancelled.clear()

    def _finish(self, waiting: Waiting, generation: Generation | None, reason: str) -> None:
        timings = self._timings(waiting, generation)
        num_generated = 0 if generation is None else generation.num_generated
        self._telemetry.finished(waiting.request, reason, timings.total_s, num_generated)
        self._forget(waiting)
        waiting.request.on_event(DoneEvent(timings, len(waiting.request.prompt_ids), num_generated))

    def _fail(self, waiting: Waiting, error: PeraxisError) -> None:
        self._telemetry.finished(waiting.request, "error", time.monotonic() - waiting.admitted_at, 0)
        self._forget(waiting)
        waiting.request.on_event(ErrorEvent(error))

    def _forget(self, waiting: Waiting) -> None:
        """Give back what a request held; it is answered next."""
        if self._running is not None and self._running[0] is waiting:
            self._running = None
        else:
            self._waiting.remove(waiting)
        if waiting.delta is not None:
            self._residency.release(waiting.delta)
        with self._lock:
            del self._open[waiting.request.id]

    def _fail_all(self, error: PeraxisError) -> None:
        for waiting in [*self._waiting, *([self._running[0]] if self._running else [])]:
            self._fail(waiting, error)
        for future in [p.future for p in self._prefetches] + [u.future for u in self._unloads]:
            future.set_exception(error)

    def _timings(self, waiting: Waiting, generation: Generation | None) -> Timings:
        now = time.monotonic()
        started = now if generation is None else self._started_at
        first = now if generation is None or generation.first_token_at is None else generation.first_token_at
        return Timings(
            queue_s=started - waiting.admitted_at,
            load_s=waiting.load_s,
            cold=waiting.cold,
            ttft_s=first - waiting.admitted_at,
            total_s=now - waiting.admitted_at,
        )


def _load_timeout(record: VersionRecord, timeout_s: float) -> LoadTimeout:
    return LoadTimeout(
        f"{label(record)} found no slot or was not loaded within {timeout_s:g} s: try again, or unpin some"
    )
