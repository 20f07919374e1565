"""Errors of requests and of the service. `server/api/errors.py` maps them and those of deltastore to HTTP."""

from __future__ import annotations

from deltastore.errors import PeraxisError


class InvalidRequest(PeraxisError):
    """A request that cannot be served; `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class QueueFull(PeraxisError):
    """The server admits no more requests now: its queue is full, or the base is still loading."""


class Draining(PeraxisError):
    """The server is shutting down and admits no new requests."""


class LoadTimeout(PeraxisError):
    """A variant was not loaded into a slot within `load_timeout`."""


class EngineRestarted(PeraxisError):
    """The engine ended with the request, or is starting again."""


class RequestTimeout(PeraxisError):
    """The client sent its request too slowly."""


class NotServable(PeraxisError):
    """A base that this server cannot serve: an unsupported architecture or device, or too little memory."""


class EngineFailed(PeraxisError):
    """A step or the engine itself failed."""


class WorkerTimeout(PeraxisError):
    """Work in a worker process that was not done at its deadline; the process was killed."""


class WorkerDied(PeraxisError):
    """A worker process that ended during its work: it used too much memory or processor time, or crashed."""


class InvalidApiKey(PeraxisError):
    """The request has no API key, or one that is wrong, revoked or expired."""


class Forbidden(PeraxisError):
    """The caller's key does not allow what the request asks."""


class KeyNotFound(PeraxisError):
    """There is no API key with this id."""
