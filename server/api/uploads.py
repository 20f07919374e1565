"""Receive one upload: stream the body to disk, verify the artifact, publish it. Memory use does not grow with its size.

The functions stand in the order in which an upload runs through them. The registry owns the files.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from types import TracebackType

import anyio
from fastapi import Request

from deltastore.errors import ArtifactError, ArtifactTooLarge, PeraxisError
from deltastore.format.artifact import Artifact
from deltastore.format.validate import check_artifact, check_base, check_size
from deltastore.registry import Publication
from deltastore.registry.records import ArtifactFacts, check_names
from deltastore.registry.uploads import SealedUpload, Upload
from server.api.errors import failure_of
from server.api.multipart import file_of_form
from server.api.service import Backend, Service
from server.errors import InvalidRequest
from server.tenants import Tenant

# Bytes that are gathered before a thread writes them.
WRITE_BYTES = 1 << 20
# Bytes that a multipart body may have beside its file.
FORM_OVERHEAD_BYTES = 64 << 10
# Bytes of a variant's tokenizer and configuration files, which are read into memory.
MAX_FILES_BYTES = 256 << 20
DIGEST_HEADER = "Content-Digest"
SHA256_MEMBER = re.compile(r"\s*sha-256=:([A-Za-z0-9+/=]*):\s*")


async def receive_upload(
    request: Request, service: Service, tenant: Tenant, name: str, *, activate: bool
) -> Publication:
    """Publish the request's body as the next version of a variant, and count the outcome.

    Raises:
        InvalidRequest, UsageError: not an upload as the API describes it.
        ArtifactError, BaseMismatch, ArtifactTooLarge: an artifact that this server cannot serve.
        StorageFull: the registry's disk is full.
    """
    outcomes = service.metrics.uploads_total
    try:
        check_names(tenant.name, name)
        backend = service.backend
        expected = _expected_digest(request)
        async with _open_upload(service) as upload:
            await _write_body(request, service, upload)
            sealed = await service.run_in_background(upload.seal)
            facts = await service.run_in_background(_verify, sealed, expected, backend)
            publication = await service.run_in_background(
                service.registry.publish, sealed, facts, tenant=tenant.name, name=name, activate=activate
            )
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
    content_type = request.headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    is_form = media_type == "multipart/form-data"
    _check_headers(request, media_type, max_bytes)
    body = request.stream()
    gathered = bytearray()
    async for chunk in file_of_form(body, content_type) if is_form else body:
        gathered += chunk
        if len(gathered) >= WRITE_BYTES:
            yield bytes(gathered)
            gathered.clear()
    if gathered:
        yield bytes(gathered)


def _check_headers(request: Request, media_type: str, max_bytes: int) -> None:
    if media_type not in ("", "application/octet-stream", "multipart/form-data"):
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
    overhead = FORM_OVERHEAD_BYTES if media_type == "multipart/form-data" else 0
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


def _verify(sealed: SealedUpload, expected_digest: str | None, backend: Backend) -> ArtifactFacts:
    """Check that this server can serve the artifact. Cheap checks run first: they bound what the others read."""
    where = "the upload"
    if expected_digest is not None and sealed.digest != expected_digest:
        raise ArtifactError(
            f"{where} has SHA-256 {sealed.digest}, and its {DIGEST_HEADER} is {expected_digest}: send it again"
        )
    with Artifact.open(sealed.path, where) as artifact:
        check_size(artifact, backend.engine.slot_bytes, where)
        check_base(artifact, backend.engine.base, where)
        check_artifact(artifact, where)
        manifest = artifact.manifest
        if artifact.header.data_bytes - manifest.device_bytes > MAX_FILES_BYTES:
            raise ArtifactTooLarge(
                f"{where} carries files of more than {MAX_FILES_BYTES} bytes: leave some out"
            )
        backend.tokenizers.check(artifact)
        return ArtifactFacts(
            data_start=artifact.header.data_start,
            device_bytes=manifest.device_bytes,
            base_fingerprint=manifest.base_fingerprint,
            method=manifest.method,
            fidelity=manifest.fidelity,
        )
