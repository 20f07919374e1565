"""Turn an error in the work for one request into the end of that request alone. Knows no step and no scheduler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType

from deltastore.errors import PeraxisError
from server.engine.requests.request_state import RequestState
from server.errors import EngineFailed, InvalidRequest

log = logging.getLogger(__name__)


class FailingAlone:
    """Suppresses any Exception of its block and fails the block's request with it."""

    __slots__ = ("_fail", "_state")

    def __init__(self, state: RequestState, fail: Callable[[RequestState, PeraxisError], None]) -> None:
        self._state = state
        self._fail = fail

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        if not isinstance(error, PeraxisError):
            request = self._state.request
            log.error("request %s failed", request.id, exc_info=error, extra=request.log_fields)
            error = step_failed(error)
        self._fail(self._state, error)
        return True


def step_failed(error: Exception) -> EngineFailed:
    """Return the error of a request whose step raised something else than a PeraxisError."""
    return EngineFailed(f"the step failed: {type(error).__name__}: {error}")


def too_long(max_tokens: int) -> InvalidRequest:
    """Return the error of a request with a sequence that the whole KV cache cannot hold."""
    return InvalidRequest(
        f"the key-value cache holds {max_tokens} tokens, and more are needed: shorten the prompt"
    )
