"""An artifact on its way in: from the body to disk, verified, then published. Memory stays flat at any size."""

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

WRITE_BYTES = 1 << 20  # gathered before a thread is asked to write
FORM_OVERHEAD = 64 << 10  # bytes that a multipart body may be larger than its file
MAX_FILES_BYTES = 256 << 20  # of a variant's tokenizer and configuration, which are read into memory
DIGEST_HEADER = "Content-Digest"
SHA256_MEMBER = re.compile(r"\s*sha-256=:([A-Za-z0-9+/=]*):\s*")


async def receive_upload(
    request: Request, service: Service, caller: Tenant, name: str, *, activate: bool
) -> Publication:
    """Take the request's body as the next version of a variant.

    Raises:
        InvalidRequest, UsageError: not an upload as the API describes it.
        ArtifactError, BaseMismatch, ArtifactTooLarge: an artifact that this server cannot serve.
        StorageFull: no room on the registry's disk.
    """
    metrics = service.metrics
    try:
        check_names(caller.name, name)
        backend, limit = service.backend, service.settings.max_upload_bytes
        expected = _expected_digest(request)
        chunks = _artifact_bytes(request, limit)
        async with _upload(service, limit) as upload:
            async with aclosing(chunks), WriteBehind(service, upload) as writer:
                async for chunk in chunks:
                    await writer.write(chunk)
            sealed = await service.run_in_background(upload.seal)
            facts = await service.run_in_background(_verify, sealed, expected, backend)
            publication = await service.run_in_background(
                service.registry.publish, sealed, facts, tenant=caller.name, name=name, activate=activate
            )
    except BaseException as error:
        refused = isinstance(error, PeraxisError) and failure_of(error).status < 500
        metrics.uploads_total.labels(result="rejected" if refused else "failed").inc()
        raise
    metrics.uploads_total.labels(result="created" if publication.created else "duplicate").inc()
    return publication


class WriteBehind:
    """Writes and hashes one piece of the body on a thread while the next one arrives.

    Leaving its `async with` block waits for the last piece, whatever comes: nothing writes to the upload any more.
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
        """Begin to write a piece, once the one before it is written; raises what that one raised."""
        await self._settle()
        self._writing = asyncio.create_task(self._write(chunk))

    async def _write(self, chunk: bytes) -> None:
        await self._service.run_in_background(self._upload.write, chunk)
        self._service.metrics.upload_bytes_total.inc(len(chunk))

    async def _settle(self) -> None:
        if self._writing is not None:
            await asyncio.shield(self._writing)


def _verify(sealed: SealedUpload, expected_digest: str | None, backend: Backend) -> ArtifactFacts:
    """Everything that must hold before the artifact gets a name. Cheap checks first: they bound what others read."""
    where = "the upload"
    if expected_digest is not None and sealed.digest != expected_digest:
        raise ArtifactError(
            f"{where} has SHA-256 {sealed.digest}, and its {DIGEST_HEADER} says {expected_digest}: send it again"
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


@asynccontextmanager
async def _upload(service: Service, limit: int) -> AsyncIterator[Upload]:
    """The registry's upload, opened and removed on a thread: unlinking gigabytes takes a while."""
    upload = await service.run_in_background(service.registry.open_upload(limit).__enter__)
    try:
        yield upload
    finally:
        await service.run_in_background(upload.__exit__, None, None, None)


async def _artifact_bytes(request: Request, limit: int) -> AsyncGenerator[bytes, None]:
    """The artifact in pieces of `WRITE_BYTES`, from a raw or a multipart body."""
    content_type = request.headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type not in ("", "application/octet-stream", "multipart/form-data"):
        raise InvalidRequest(
            f"an artifact cannot be sent as {media_type}: set Content-Type to application/octet-stream, "
            "or send a multipart/form-data field called file",
            "Content-Type",
        )
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise InvalidRequest("an artifact is sent as it is, without Content-Encoding", "Content-Encoding")
    is_form = media_type == "multipart/form-data"
    length = int(
        request.headers.get("content-length", "0")
    )  # the HTTP library has checked that it is a number
    if length > limit + (FORM_OVERHEAD if is_form else 0):
        raise ArtifactTooLarge(
            f"the upload has {length} bytes and this server takes {limit}: see --max-upload-gb"
        )
    body = request.stream()
    source = file_of_form(body, content_type) if is_form else body
    gathered = bytearray()
    async for chunk in source:
        gathered += chunk
        if len(gathered) >= WRITE_BYTES:
            yield bytes(gathered)
            gathered.clear()
    if gathered:
        yield bytes(gathered)


def _expected_digest(request: Request) -> str | None:
    """The SHA-256 of the artifact that the client promises, as hex; InvalidRequest where it cannot be read."""
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
