"""Open requests: checks new ones, refuses those that cannot be served, counts the others. Thread-safe.

Runs on the threads that submit; knows no scheduler and no model.
"""

from __future__ import annotations

import threading

from deltastore.errors import PeraxisError
from server.engine.request import Request
from server.engine.request_state import OnEvent
from server.engine.telemetry import Telemetry
from server.errors import Draining, InvalidRequest, QueueFull
from server.text.tokenizer import Tokenizers, VariantTokenizer


class OpenRequests:
    """Requests that were admitted and are not answered in full.

    Args:
        max_open: most requests that run or wait.
        max_model_len: most tokens of prompt and output together.
    """

    def __init__(
        self, tokenizers: Tokenizers, telemetry: Telemetry, max_open: int, max_model_len: int
    ) -> None:
        self.max_model_len = max_model_len
        self._max_open = max_open
        self._tokenizers = tokenizers
        self._telemetry = telemetry
        self._lock = threading.Lock()
        self._open: dict[str, tuple[Request, OnEvent]] = {}
        self._draining = False

    def add(self, request: Request, on_event: OnEvent) -> VariantTokenizer:
        """Admit a request and return its variant's tokenizer. Reads files if the tokenizer is not cached.

        Raises:
            InvalidRequest: it cannot be served.
            QueueFull, Draining: it can be sent again later.
            ArtifactError, VariantQuarantined, VariantNotFound: the tokenizer cannot be loaded.
        """
        try:
            tokenizer = self._tokenizers.of(request.record)
            request.check(tokenizer.num_embeddings, self.max_model_len)
            with self._lock:
                if self._draining:
                    raise Draining("the server is shutting down: send the request to another replica")
                if len(self._open) >= self._max_open:
                    raise QueueFull(f"{len(self._open)} requests run or wait: try again in a moment")
                if request.id in self._open:
                    raise InvalidRequest(f"request id {request.id!r} is in use: choose another")
                self._open[request.id] = request, on_event
        except PeraxisError as error:
            self._telemetry.rejected(request, error)
            raise
        return tokenizer

    def remove(self, request: Request) -> None:
        """Forget a request that is being answered with its last event."""
        with self._lock:
            self._open.pop(request.id, None)

    def remove_all(self) -> list[OnEvent]:
        """Forget every open request. Return where their events go."""
        with self._lock:
            removed, self._open = self._open, {}
        return [on_event for _, on_event in removed.values()]

    def num_open(self) -> int:
        """Return how many requests are open."""
        return len(self._open)

    def num_open_of(self, digest: str) -> int:
        """Return how many open requests run on a delta."""
        with self._lock:
            return sum(request.digest == digest for request, _ in self._open.values())

    def drain(self) -> None:
        """Refuse new requests from now on."""
        with self._lock:
            self._draining = True
