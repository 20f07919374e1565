"""Receive one upload: stream the body to disk, check the artifact, publish it. Memory use does not grow with its size.

The functions stand in the order in which an upload runs through them. The registry owns the files.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from types import TracebackType

import anyio
from fastapi import Request

from deltastore.errors import ArtifactError, ArtifactTooLarge, PeraxisError
from deltastore.format.header import check_prefix
from deltastore.registry import Publication
from deltastore.registry.records import ArtifactFacts, check_names
from deltastore.registry.uploads import SealedUpload, Upload
from server.api.artifacts.multipart import file_of_form
from server.api.bodies import timed_chunks
from server.api.errors import failure_of
from server.api.request_events import while_connected
from server.api.service import Service
from server.errors import InvalidRequest, QueueFull
from server.tenants import Tenant

# Bytes that are gathered before a thread writes them.
WRITE_BYTES = 1 << 20
# Bytes that a multipart body may have beside its file.
FORM_OVERHEAD_BYTES = 64 << 10
# The bytes at the beginning of an artifact that tell it from most other files.
PREFIX_BYTES = 9
# Uploads of one tenant at a time. Each keeps up to 2 MB in memory.
MAX_UPLOADS_PER_TENANT = 16
FORM = "multipart/form-data"
DIGEST_HEADER = "Content-Digest"
SHA256_MEMBER = re.compile(r"\s*sha-256=:([A-Za-z0-9+/=]*):\s*")


async def receive_upload(
    request: Request, service: Service, tenant: Tenant, name: str, *, activate: bool
) -> Publication:
    """Publish the request's body as the next version of a variant, and count the outcome.

    Raises:
        InvalidRequest, UsageError: not an upload as the API describes it.
        RequestTimeout: the body came too slowly.
        ArtifactError, BaseMismatch, ArtifactTooLarge: an artifact that this server cannot serve.
        StorageFull: the registry's disk is full.
        QueueFull: the tenant has `MAX_UPLOADS_PER_TENANT` uploads under way.
    """
    outcomes = service.metrics.uploads_total
    try:
        check_names(tenant.name, name)
        expected = _expected_digest(request)
        _check_headers(request, service.settings.max_upload_bytes)
        # Refuse while no base was ever loaded: without one, no artifact can be checked.
        _ = service.engine.facts
        with _one_more(service.num_uploads, tenant):
            publication = await _receive(request, service, tenant, name, expected, activate)
    except BaseException as error:
        rejected = isinstance(error, PeraxisError) and failure_of(error).status < 500
        outcomes.labels(result="rejected" if rejected else "failed").inc()
        raise
    outcomes.labels(result="created" if publication.created else "duplicate").inc()
    return publication


def _expected_digest(request: Request) -> str | None:
    """Return the SHA-256 in `Content-Digest` as hex, or None without it; raise InvalidRequest if it is malformed."""
    header = request.headers.get(DIGEST_HEADER)
    if header is None:
        return None
    found = next(filter(None, map(SHA256_MEMBER.fullmatch, header.split(","))), None)
    try:
        digest = base64.b64decode(found[1], validate=True) if found else b""
    except binascii.Error:
        digest = b""
    if len(digest) != 32:
        raise InvalidRequest(
            f"{DIGEST_HEADER} must hold sha-256=:BASE64:, the artifact's SHA-256", DIGEST_HEADER
        )
    return digest.hex()


@contextmanager
def _one_more(num_uploads: Counter[str], tenant: Tenant) -> Iterator[None]:
    """Count an upload of a tenant inside the block; raise QueueFull if it has too many under way."""
    if num_uploads[tenant.name] >= MAX_UPLOADS_PER_TENANT:
        raise QueueFull(
            f"{MAX_UPLOADS_PER_TENANT} uploads are under way: send this one when another has ended"
        )
    num_uploads[tenant.name] += 1
    try:
        yield
    finally:
        num_uploads[tenant.name] -= 1


async def _receive(
    request: Request, service: Service, tenant: Tenant, name: str, expected_digest: str | None, activate: bool
) -> Publication:
    """Write, check and publish the body. Leaving early removes what was written."""
    async with _open_upload(service) as upload:
        service.artifact_checks.prepare()
        await _write_body(request, service, upload)
        sealed = await service.run_in_background(upload.seal)
        _check_digest(sealed, expected_digest)
        facts = await while_connected(request, _check(service, tenant, sealed))
        return await service.run_in_background(
            service.registry.publish, sealed, facts, tenant=tenant.name, name=name, activate=activate
        )


@asynccontextmanager
async def _open_upload(service: Service) -> AsyncIterator[Upload]:
    """Open the registry's upload and remove its partial file on a thread: unlinking gigabytes takes long."""
    opened = service.registry.open_upload(service.settings.max_upload_bytes)
    upload = await service.run_in_background(opened.__enter__)
    try:
        yield upload
    finally:
        await service.run_in_background(upload.__exit__, None, None, None)


async def _write_body(request: Request, service: Service, upload: Upload) -> None:
    chunks = _artifact_bytes(request, service.settings.max_upload_bytes)
    async with aclosing(chunks), WriteBehind(service, upload) as writer:
        async for chunk in chunks:
            await writer.write(chunk)


async def _artifact_bytes(request: Request, max_bytes: int) -> AsyncGenerator[bytes, None]:
    """Yield the artifact in chunks of `WRITE_BYTES` or more, from a raw or a multipart body; the last may be less."""
    is_form = _media_type(request) == FORM
    max_bytes = max_bytes if is_form else int(request.headers.get("content-length", max_bytes))
    gathered, is_begun = bytearray(), False
    async with aclosing(timed_chunks(request)) as body:
        async for chunk in file_of_form(body, request.headers["content-type"]) if is_form else body:
            gathered += chunk
            if not is_begun and len(gathered) >= PREFIX_BYTES:
                is_begun = True
                check_prefix(bytes(gathered[:PREFIX_BYTES]), max_bytes)
            if len(gathered) >= WRITE_BYTES:
                yield bytes(gathered)
                gathered.clear()
    if gathered:
        yield bytes(gathered)


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _check_headers(request: Request, max_bytes: int) -> None:
    media_type = _media_type(request)
    if media_type not in ("", "application/octet-stream", FORM):
        raise InvalidRequest(
            f"an artifact cannot be sent as {media_type}: set Content-Type to application/octet-stream, "
            "or send a multipart/form-data field called file",
            "Content-Type",
        )
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise InvalidRequest(
            "an artifact cannot be encoded: send it without Content-Encoding", "Content-Encoding"
        )
    # uvicorn has checked that Content-Length is a number.
    length = int(request.headers.get("content-length", "0"))
    overhead = FORM_OVERHEAD_BYTES if media_type == FORM else 0
    if length > max_bytes + overhead:
        raise ArtifactTooLarge(
            f"the upload has {length} bytes and this server takes {max_bytes}: send a smaller one, "
            "or raise the server's --max-upload-gb"
        )


class WriteBehind:
    """Write and hash each chunk on a thread while the next one arrives.

    Leaving the `async with` block waits for the last write, even when the block is cancelled. Afterwards nothing writes
    to the upload.
    """

    def __init__(self, service: Service, upload: Upload) -> None:
        self._service = service
        self._upload = upload
        self._writing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> WriteBehind:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writing is None:
            return
        with anyio.CancelScope(shield=True):
            await asyncio.gather(self._writing, return_exceptions=True)
        if error is None:
            self._writing.result()

    async def write(self, chunk: bytes) -> None:
        """Start to write a chunk once the previous one is written; raise the error of the previous write."""
        if self._writing is not None:
            await asyncio.shield(self._writing)
        self._writing = asyncio.create_task(self._write(chunk))

    async def _write(self, chunk: bytes) -> None:
        await self._service.run_in_background(self._upload.write, chunk)
        self._service.metrics.upload_bytes_total.inc(len(chunk))


def _check_digest(sealed: SealedUpload, expected: str | None) -> None:
    if expected is not None and sealed.digest != expected:
        raise ArtifactError(
            f"the upload has SHA-256 {sealed.digest}, and its {DIGEST_HEADER} is {expected}: send it again"
        )


async def _check(service: Service, tenant: Tenant, sealed: SealedUpload) -> ArtifactFacts:
    engine = service.engine.facts
    return await service.artifact_checks.check(
        tenant.name, sealed.path, sealed.size_bytes, engine.base, engine.slot_bytes
    )
