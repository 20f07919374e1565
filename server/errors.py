"""Errors of requests and of the service. `server/api/errors.py` maps them and those of deltastore to HTTP."""

from __future__ import annotations

from collections.abc import Sequence

from deltastore.errors import ArtifactError, PeraxisError, VariantQuarantined, shown
from server.tenants.tenant import Rates


class InvalidRequest(PeraxisError):
    """A request that cannot be served; `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextTooLong(InvalidRequest):
    """A prompt, or a prompt and its new tokens, longer than fits."""


class QueueFull(PeraxisError):
    """The server admits no more requests now: its queue is full, or the base is still loading."""


class RateLimited(PeraxisError):
    """The tenant is over one of its limits.

    Args:
        param: the limit, a field of `TenantLimits`.
        retry_after_s: after which the same request fits; None if waiting does not help, as for stored bytes.
        rates: the tenant's limits per minute; None where they do not matter.
    """

    def __init__(
        self, message: str, param: str, *, retry_after_s: int | None = None, rates: Rates | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after_s = retry_after_s
        self.rates = rates


class Draining(PeraxisError):
    """The server is shutting down and admits no new requests."""


class LoadTimeout(PeraxisError):
    """A variant was not loaded into a slot within `load_timeout`."""


class MaskTimeout(PeraxisError):
    """The tokens that a response format allows next were not computed in time."""


class EngineRestarted(PeraxisError):
    """The engine ended with the request, or is starting again."""


class RequestTimeout(PeraxisError):
    """The client sent its request too slowly."""


class LinkBroken(PeraxisError):
    """A process of the server sent what is no message; the link to it cannot be used any more."""


class EngineFailed(PeraxisError):
    """A step or the engine itself failed."""


class EndedEngine(EngineFailed):
    """The engine died while it computed this request and no other."""


class VersionEndsEngines(VariantQuarantined):
    """Engines have died at requests for this version."""


class WorkerTimeout(PeraxisError):
    """Work in a worker process that was not done at its deadline; the process was killed."""


class WorkerDied(PeraxisError):
    """A worker process that ended during its work: it used too much memory or processor time, or crashed."""


class WorkerKilled(WorkerDied):
    """A worker process that did not start, or was killed from outside its limits: its work may not be at fault."""


class InvalidApiKey(PeraxisError):
    """The request has no API key, or one that is wrong, revoked or expired."""


class Forbidden(PeraxisError):
    """The caller's key does not allow what the request asks."""


class KeyNotFound(PeraxisError):
    """There is no API key with this id."""


def unread_tensor(names: Sequence[str]) -> ArtifactError:
    """Return the error for an artifact that changes tensors which no layer reads from a delta."""
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return ArtifactError(
        f"it changes {shown(names[0])}{more}, which layers of this base read and a delta cannot act on: keep the "
        "base's values in the fine-tune, or serve what `peraxis merge` writes as a base of its own"
    )
