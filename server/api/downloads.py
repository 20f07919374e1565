"""Send a version's artifact, whole or a range of it; every byte comes from a chunk that matches its digest.

A chunk is read and hashed on a background thread, in tenants' turns, and no thread waits for a client. A download holds
one chunk, which counts as unread bytes of its tenant.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import ParamSpec, TypeVar

from anyio.lowlevel import checkpoint_if_cancelled
from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Send

from deltastore.errors import PeraxisError
from deltastore.registry import Registry
from deltastore.registry.records import VersionRecord
from deltastore.registry.uploads import CHUNK_BYTES
from deltastore.verified_object import VerifiedObject
from server.errors import InvalidRequest
from server.fairness import FairBudget, FairLimiter
from server.registry_calls import BackgroundThreads

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

NUM_THREADS = 2
# Chunks of one tenant that wait for a thread: more than connections, so that a download under way never fails.
MAX_WAITING = 1 << 16
# Bytes that are handed to the web server at once; the rest of a chunk waits until the client has taken them.
SEND_BYTES = 256 << 10
MEDIA_TYPE = "application/octet-stream"
RANGES = re.compile(r"bytes=\s*(?:\d+-\d*|-\d+)(?:\s*,\s*(?:\d+-\d*|-\d+))*\s*", re.ASCII | re.IGNORECASE)
MAX_RANGE_HEADER = 1024


class Downloads:
    """The threads, and the memory of chunks, that the downloads of one process share.

    Args:
        unsent: bytes that clients have not read.
    """

    def __init__(self, unsent: FairBudget) -> None:
        self._unsent = unsent
        self._threads = BackgroundThreads(NUM_THREADS, "download")
        self._turns = FairLimiter(NUM_THREADS, NUM_THREADS, MAX_WAITING)

    async def run(self, tenant: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a function on a thread in the tenant's turn. Neither waiting for the thread nor its work is cancelled."""
        async with self._turns.permit(tenant):
            return await self._threads.run(function, *args, **kwargs)

    @asynccontextmanager
    async def opened(
        self, tenant: str, registry: Registry, record: VersionRecord
    ) -> AsyncIterator[VerifiedObject]:
        """Open a version's object, and count the memory of a chunk.

        Raises:
            QueueFull: the tenant leaves too much unread.
        """
        with self._unsent.holding(tenant, min(CHUNK_BYTES, record.size_bytes)):
            async with AsyncExitStack() as stack:
                # In a bucket, opening fetches the object.
                async with self._turns.permit(tenant):
                    # On threads: closing a removed file of gigabytes frees its blocks.
                    opening = self._threads.entered(VerifiedObject(registry, record))
                    stored = await stack.enter_async_context(opening)
                yield stored


class ArtifactResponse(StreamingResponse):
    """A download of one version.

    The first chunk is verified before the reply begins, so a corrupt or missing object is answered with an error. If a
    later chunk is corrupt, the body ends early and the web server closes the connection: the client has received fewer
    bytes than `Content-Length` says.
    """

    def __init__(
        self,
        registry: Registry,
        record: VersionRecord,
        selection: Selection,
        downloads: Downloads,
        tenant: str,
    ) -> None:
        headers = {
            **selection.headers,
            "ETag": etag_of(record),
            "Last-Modified": _last_modified(record),
            "Accept-Ranges": "bytes",
            "Content-Disposition": f'attachment; filename="{record.name}-{record.version}.safetensors"',
        }
        self._registry = registry
        self._record = record
        self._selection = selection
        self._downloads = downloads
        self._tenant = tenant
        self._pieces = self._body()
        super().__init__(self._pieces, selection.status, headers)

    async def stream_response(self, send: Send) -> None:
        """Send the reply; raises as `VerifiedObject` does as long as nothing was sent."""
        async with aclosing(self._pieces) as pieces:
            piece: bytes | None = await anext(pieces)
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            try:
                while piece is not None:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                    piece = await anext(pieces, None)
            except PeraxisError as error:
                # Without the last message of the body, the web server closes the connection.
                log.error("a download of %s was broken off: %s", self._record.label, error)
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _body(self) -> AsyncGenerator[bytes, None]:
        """Yield the body in pieces of about `SEND_BYTES`."""
        async with self._downloads.opened(self._tenant, self._registry, self._record) as stored:
            for start, end in _blocks(self._selection.range):
                # Neither `run` nor sending to a client that has left can be cancelled.
                await checkpoint_if_cancelled()
                block = await self._downloads.run(self._tenant, stored.view, start, end)
                for offset in range(0, len(block), SEND_BYTES):
                    yield bytes(block[offset : offset + SEND_BYTES])


def selected(request: Request, record: VersionRecord) -> Selection:
    """Return what a download's `Range` and `If-Range` select; raises as `select` does."""
    selection = select(request.headers.get("range"), record.size_bytes)
    if request.headers.get("if-range") in (None, etag_of(record), _last_modified(record)):
        return selection
    return select(None, record.size_bytes)


def etag_of(record: VersionRecord) -> str:
    """Return the entity tag of a version's artifact, its digest."""
    return f'"sha256:{record.digest}"'


def _last_modified(record: VersionRecord) -> str:
    return format_datetime(datetime.fromisoformat(record.created_at).astimezone(UTC), usegmt=True)


@dataclass(frozen=True, slots=True)
class Selection:
    """The bytes of a file that a reply sends, and the status and headers that tell which."""

    status: int
    headers: dict[str, str]
    range: range  # not empty


def select(header: str | None, size_bytes: int) -> Selection:
    """Return what a `Range` header selects of a file of `size_bytes`.

    Without a header it is the whole file; with several ranges, too, which RFC 9110 lets a server ignore.

    Raises:
        InvalidRequest: the header is malformed.
        HTTPException: 416, the range begins past the end.
    """
    selected = None if header is None else _range(header, size_bytes)
    found = range(size_bytes) if selected is None else selected
    headers = {"Content-Type": MEDIA_TYPE, "Content-Length": str(len(found))}
    if selected is None:
        return Selection(200, headers, found)
    headers["Content-Range"] = f"bytes {found.start}-{found.stop - 1}/{size_bytes}"
    return Selection(206, headers, found)


def _range(header: str, size_bytes: int) -> range | None:
    """Return the one range of a header; None if it has several."""
    if len(header) > MAX_RANGE_HEADER or not RANGES.fullmatch(header):
        raise InvalidRequest(f"Range must be bytes=FIRST-LAST, got {header[:80]!r}", "Range")
    (first, last), *more = re.findall(r"(\d*)-(\d*)", header)
    if more:
        return None
    begin = int(first) if first else size_bytes - int(last)
    if begin >= size_bytes:
        raise HTTPException(
            416, f"the artifact has {size_bytes} bytes", {"Content-Range": f"bytes */{size_bytes}"}
        )
    if first and last and int(last) < begin:
        raise InvalidRequest(f"Range must not end before it begins, got {header[:80]!r}", "Range")
    end = min(int(last) + 1, size_bytes) if first and last else size_bytes
    return range(max(begin, 0), end)


def _blocks(selected: range) -> Iterator[tuple[int, int]]:
    """Yield a range of the file in pieces that each lie in one chunk: first byte and the byte after the last."""
    start = selected.start
    while start < selected.stop:
        end = min((start // CHUNK_BYTES + 1) * CHUNK_BYTES, selected.stop)
        yield start, end
        start = end
