"""The engine as other threads see it: requests and calls go in through a queue, events come out.

Owns the engine thread, which owns the model; its step is `core.py`. Knows no HTTP.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from deltastore.base.base import Base
from deltastore.errors import PeraxisError
from deltastore.registry.records import VersionRecord
from server.deltas.residency import Level, Residency
from server.engine.call_queue import CallQueue
from server.engine.core import EngineCore
from server.engine.events import ErrorEvent
from server.engine.open_requests import OpenRequests
from server.engine.request import Request
from server.engine.request_state import OnEvent
from server.engine.residency_calls import Prefetch, Unload
from server.errors import Draining

SWITCH_S = 0.0005  # between the interpreter's thread switches; Python's default is ten times as long
IDLE_S = 0.2  # between checks for work when nothing arrives
STUCK_S = 60.0  # without a step or a check, after which the engine does not count as alive


class Engine:
    """Runs requests on a thread of its own. Public methods may be called from any thread.

    Args:
        on_lost: called on the engine thread when it ends without having been told to, as when the device is lost.
    """

    def __init__(
        self,
        core: EngineCore,
        calls: CallQueue,
        open_requests: OpenRequests,
        residency: Residency,
        base: Base,
        on_lost: Callable[[], None],
    ) -> None:
        self.base = base
        self._on_lost = on_lost
        self._core = core
        self._open_requests = open_requests
        self._residency = residency
        self._calls = calls
        self._stopping = False
        self._beat = time.monotonic()
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, on_event: OnEvent) -> None:
        """Admit a request. Not for the event loop: reads files if the variant's tokenizer is not cached.

        Args:
            request: its id must differ from those of all open requests.
            on_event: called on the engine thread with each event, a DoneEvent or an ErrorEvent last; must not block.

        Raises:
            InvalidRequest: the request cannot be served.
            QueueFull, Draining: the request can be sent again later.
            ArtifactError, VariantQuarantined, VariantNotFound: the variant's tokenizer cannot be loaded.
        """
        tokenizer = self._open_requests.add(request, on_event)
        # Taken here, so that the wait in the call queue counts.
        submitted_at = time.monotonic()
        self._calls.put(lambda: self._core.add_request(request, tokenizer, on_event, submitted_at))

    def cancel(self, request_id: str) -> None:
        """End a request whose client is gone; unknown ids are ignored."""
        self._calls.put(lambda: self._core.cancel(request_id))

    def load(self, record: VersionRecord, *, pin: bool = False) -> Future[None]:
        """Load a version into a slot and, with `pin`, never evict it; done when requests can use it."""
        future: Future[None] = Future()
        self._calls.put(lambda: self._core.residency_calls.add_prefetch(Prefetch(record, pin, future)))
        return future

    def pin(self, record: VersionRecord) -> Future[None]:
        """Load a version and never evict it."""
        return self.load(record, pin=True)

    def unpin(self, record: VersionRecord) -> Future[None]:
        """Let a version be evicted again."""
        return self._call(lambda: self._residency.unpin(record.digest))

    def unload(self, record: VersionRecord) -> Future[None]:
        """Free a version's slot once no request runs on it; done when it is free."""
        future: Future[None] = Future()
        self._calls.put(lambda: self._core.residency_calls.add_unload(Unload(record.digest, future)))
        return future

    def level_of(self, digest: str) -> Level:
        """Return where a delta is now: ``device``, ``host`` or ``disk``."""
        return self._residency.level_of(digest)

    def is_pinned(self, digest: str) -> bool:
        """Return whether a delta is never evicted from its slot."""
        return self._residency.is_pinned(digest)

    def num_requests_on(self, digest: str) -> int:
        """Return how many requests on a delta are admitted and not answered in full."""
        return self._open_requests.num_open_of(digest)

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self._open_requests.max_model_len

    @property
    def slot_bytes(self) -> int:
        """Size of a slot; no delta may be larger."""
        return self._residency.slot_bytes

    def alive(self) -> bool:
        """Return whether the engine thread still runs steps or waits for work."""
        return not self._stopping and self._thread.is_alive() and time.monotonic() - self._beat < STUCK_S

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self._open_requests.drain()

    def close(self, timeout_s: float = 0.0) -> None:
        """Refuse new requests, let the admitted ones end for up to `timeout_s`, then stop the thread."""
        self.drain()
        deadline = time.monotonic() + timeout_s
        while self._open_requests.num_open() and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        self._stopping = True
        self._thread.join(STUCK_S)
        self._residency.close()

    def _call(self, function: Callable[[], None]) -> Future[None]:
        """Run a function on the engine thread."""
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
        """Step until told to stop. Any other end answers every request with an error and calls `on_lost`."""
        told_to_stop = busy = False
        sys.setswitchinterval(SWITCH_S)
        try:
            while not self._stopping:
                self._beat = time.monotonic()
                self._calls.run(wait_s=0.0 if busy else IDLE_S)
                busy = self._core.step()
            told_to_stop = True
        finally:
            self._stopping = True
            self.drain()
            self._fail_all(Draining("the server has shut down: send the request again"))
            if not told_to_stop:
                self._on_lost()

    def _fail_all(self, error: PeraxisError) -> None:
        """Answer the core's requests, then those whose call came too late for it."""
        try:
            self._calls.run(wait_s=0.0)
            self._core.fail_all(error)
        finally:
            for on_event in self._open_requests.remove_all():
                on_event(ErrorEvent(error))
