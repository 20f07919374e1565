"""The state of one publication from a source, as the processes of a server tell it to each other."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct


class SourceJob(Struct, frozen=True, kw_only=True):
    """A publication from a source at one moment.

    Attributes:
        id: unique on the server.
        tenant: the owner; others do not see the job.
        name: the variant that the artifact becomes a version of.
        source: as the client gave it.
        status: ``running``; then ``done`` with `result`, or ``failed`` with `error`.
        revision: the commit that a hub's revision was when the job began.
        num_bytes: bytes received so far.
        size_bytes: of the artifact, if its source tells.
        started_at: in seconds since 1970.
        result: what an upload of the same bytes would have been answered with.
        error: the ``error`` that a refused upload of the same bytes would have been answered with.
    """

    id: str
    tenant: str
    name: str
    source: str
    status: Literal["running", "done", "failed"] = "running"
    revision: str | None = None
    num_bytes: int = 0
    size_bytes: int | None = None
    started_at: float
    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
