"""What a request or the service can fail with, beside the errors of the store. `api/errors.py` maps all to HTTP."""

from __future__ import annotations

from deltastore.errors import PeraxisError


class InvalidRequest(PeraxisError):
    """A request that cannot be served as it is; `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class QueueFull(PeraxisError):
    """More requests wait than the server admits."""


class Draining(PeraxisError):
    """The server is shutting down and takes no new requests."""


class LoadTimeout(PeraxisError):
    """A variant could not be brought into a slot in time."""


class NotServable(PeraxisError):
    """A base whose architecture this server cannot run delta-aware."""


class EngineFailed(PeraxisError):
    """A step failed; the requests in it fail with this and nothing else does."""
