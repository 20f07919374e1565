"""Receive one upload: the artifact in the body of a request, raw or as a form's file.

`publishing.py` writes, checks and publishes what arrives. The functions stand in the order in which an upload runs
through them.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING

from fastapi import Request

from deltastore.errors import ArtifactError, ArtifactTooLarge
from deltastore.registry import Publication
from deltastore.registry.records import check_names
from deltastore.registry.uploads import SealedUpload
from server.api.artifacts.content_digest import HEADER, expected_sha256
from server.api.artifacts.multipart import file_of_form
from server.api.artifacts.publishing import (
    Destination,
    check,
    counted,
    gathered,
    one_more_upload,
    publish,
    sealed_upload,
)
from server.api.bodies import media_type_of, timed_chunks
from server.api.outputs.request_events import while_connected
from server.api.service import Service
from server.api.tenants.limits import counted_upload
from server.errors import InvalidRequest

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

# Bytes that a multipart body may have beside its file.
FORM_OVERHEAD_BYTES = 64 << 10
FORM = "multipart/form-data"


async def receive_upload(request: Request, service: Service, destination: Destination) -> Publication:
    """Publish the request's body as the next version of a variant, and count the outcome.

    Raises:
        InvalidRequest, UsageError: not an upload as the API describes it.
        RequestTimeout: the body came too slowly.
        ArtifactError, BaseMismatch, ArtifactTooLarge: an artifact that this server cannot serve.
        StorageFull: the registry's disk is full.
        PublicNameTaken: the variant is to be public, and another tenant's of this name is.
        QueueFull: the tenant has `MAX_UPLOADS_PER_TENANT` uploads under way in this process.
        RateLimited: the tenant is over its limit of uploads or of stored bytes.
    """
    return await counted(service, _receive(request, service, destination))


async def _receive(request: Request, service: Service, destination: Destination) -> Publication:
    """Write, check and publish the body. Leaving early removes what was written."""
    check_names(destination.tenant.name, destination.name)
    if destination.visibility is not None:
        await service.volume.run_long(
            partial(destination.changes.check_visibility, destination.name, destination.visibility),
            destination.tenant.name,
        )
    expected = expected_sha256(request)
    max_bytes = service.settings.max_upload_bytes
    _check_headers(request, max_bytes)
    # Refuse while no base was ever loaded: without one, no artifact can be checked.
    _ = service.engine.facts
    # A form's content is more than its file, so it has a digest of its own.
    form_hash = hashlib.sha256() if media_type_of(request) == FORM else None
    pieces = _artifact_bytes(request, form_hash)
    length = max_bytes if form_hash else int(request.headers.get("content-length", max_bytes))
    with one_more_upload(service, destination.tenant):
        digest = None if form_hash else expected
        async with (
            counted_upload(
                service, destination.tenant, destination.name, _size_limit(request), digest
            ) as upload,
            aclosing(pieces),
            sealed_upload(service, destination.tenant, upload.counted(gathered(pieces, length))) as sealed,
        ):
            _check_digest(sealed, form_hash, expected)
            facts = await while_connected(request, check(service, destination, sealed))
            return await publish(service, destination, sealed, facts, upload)


def _check_headers(request: Request, max_bytes: int) -> None:
    media_type = media_type_of(request)
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


def _size_limit(request: Request) -> int | None:
    """Return the most bytes that the body can have; None if the client did not say."""
    length = request.headers.get("content-length")
    return None if length is None else int(length)


async def _artifact_bytes(request: Request, form_hash: Hash | None) -> AsyncGenerator[bytes, None]:
    """Yield the artifact as it arrives: the body, or with `form_hash`, which hashes the whole body, a form's file."""
    async with aclosing(timed_chunks(request)) as body:
        if form_hash is None:
            async for chunk in body:
                yield chunk
            return
        hashed = _hashed(body, form_hash)
        async with aclosing(hashed):
            async for chunk in file_of_form(hashed, request.headers["content-type"]):
                yield chunk


async def _hashed(body: AsyncGenerator[bytes, None], running: Hash) -> AsyncGenerator[bytes, None]:
    async for chunk in body:
        running.update(chunk)
        yield chunk


def _check_digest(sealed: SealedUpload, form_hash: Hash | None, expected: str | None) -> None:
    found = form_hash.hexdigest() if form_hash else sealed.digest
    if expected is not None and found != expected:
        raise ArtifactError(f"the upload has SHA-256 {found}, and its {HEADER} is {expected}: send it again")
