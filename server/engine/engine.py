"""The engine as other threads see it: requests and calls go in through one queue, answers come back as events.

One thread owns the model; what it does is `core.py`. A request is refused here, before it costs anybody anything.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from deltastore.base.base import Base
from deltastore.errors import PeraxisError
from deltastore.registry.records import VersionRecord
from server.deltas.residency import Residency
from server.engine.admitted import Prefetch, Unload
from server.engine.core import Core
from server.engine.request import ErrorEvent, Request
from server.engine.telemetry import Telemetry
from server.errors import Draining, InvalidRequest, QueueFull
from server.settings import Settings

SWITCH_S = 0.0005  # after which other threads give the interpreter back, ten times sooner than by default
IDLE_S = 0.2  # how long the loop sleeps when nothing happens
STUCK_S = 60.0  # a thread that has not come round for so long is not alive


class Engine:
    """See the module. Public methods may be called from any thread."""

    def __init__(
        self,
        settings: Settings,
        core: Core,
        residency: Residency,
        base: Base,
        telemetry: Telemetry,
        max_model_len: int,
        on_lost: Callable[[], None],
    ) -> None:
        """`max_model_len` counts the tokens of prompt and output; `on_lost` is called when the device is lost."""
        self.base = base
        self.max_model_len = max_model_len
        self._max_open = settings.max_num_seqs + settings.max_queue  # requests that run or wait
        self._on_lost = on_lost
        self._core = core
        self._residency = residency
        self._telemetry = telemetry
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: dict[str, Request] = {}  # admitted and not answered, by id
        self._draining = self._stopping = False
        self._beat = time.monotonic()
        core.load_timeout_s = settings.load_timeout
        core.on_answered = self._answered
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
            request.check(self.max_model_len)
            with self._lock:
                if self._draining or not self._thread.is_alive():
                    raise Draining("the server is shutting down: send the request to another replica")
                if len(self._open) >= self._max_open:
                    raise QueueFull(f"{len(self._open)} requests run or wait: try again in a moment")
                if request.id in self._open:
                    raise InvalidRequest(f"request id {request.id!r} is in use: choose another")
                self._open[request.id] = request
        except PeraxisError as error:
            self._telemetry.rejected(error)
            raise
        self._calls.put(lambda: self._core.admit(request))

    def cancel(self, request_id: str) -> None:
        """End a request whose client is gone; unknown ids are ignored."""
        self._calls.put(lambda: self._core.cancel(request_id))

    def load(self, record: VersionRecord, *, pin: bool = False) -> Future[None]:
        """Bring a version into a slot (and keep it there, with `pin`); done when it is visible."""
        future: Future[None] = Future()
        self._calls.put(lambda: self._core.prefetch(Prefetch(record, pin, future)))
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
        self._calls.put(lambda: self._core.unload(Unload(record.digest, future)))
        return future

    def level_of(self, digest: str) -> str:
        """Where a version is now: ``device``, ``host`` or ``disk``."""
        return self._residency.level_of(digest)

    def is_pinned(self, digest: str) -> bool:
        return self._residency.is_pinned(digest)

    def in_use(self, digest: str) -> int:
        """How many admitted requests of a digest have not been answered in full."""
        with self._lock:
            return sum(request.digest == digest for request in self._open.values())

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

    def _answered(self, request: Request) -> None:
        with self._lock:
            self._open.pop(request.id, None)

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
        told_to_stop = busy = False
        sys.setswitchinterval(SWITCH_S)
        try:
            while not self._stopping:
                self._beat = time.monotonic()
                self._take_calls(wait_s=0.0 if busy else IDLE_S)
                busy = self._core.turn()
            told_to_stop = True
        finally:
            self._stopping = True
            self.drain()
            self._tell_all(Draining("the server has shut down: send the request again"))
            if not told_to_stop:
                self._on_lost()

    def _tell_all(self, error: PeraxisError) -> None:
        """Nothing more comes: for those whom the core knows, for calls that came too late, for whatever was lost."""
        try:
            self._take_calls(wait_s=0.0)
            self._core.fail_all(error)
        finally:
            with self._lock:
                lost, self._open = list(self._open.values()), {}
            for request in lost:
                request.on_event(ErrorEvent(error))

    def _take_calls(self, wait_s: float) -> None:
        """Every call that waits; sleep until one comes for at most `wait_s`."""
        try:
            call = self._calls.get(timeout=wait_s) if wait_s else self._calls.get_nowait()
            while True:
                call()
                call = self._calls.get_nowait()
        except queue.Empty:
            return
