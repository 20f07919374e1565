"""Receive one artifact: the body of a request, raw or as a form's file, with its `Content-Digest`; or a path in JSON.

`publishing.py` writes, checks and publishes what arrives.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from deltastore.errors import ArtifactError
from deltastore.registry import Publication
from deltastore.registry.records import check_names
from deltastore.registry.uploads import SealedUpload
from server.api.json_io import check_encoding, json_body, media_type_of, timed_chunks
from server.api.outputs import while_connected
from server.api.publishing import (
    Destination,
    check,
    check_size,
    check_visibility,
    counted,
    counted_upload,
    gathered,
    one_more_upload,
    publish,
    publish_file,
    sealed_upload,
)
from server.api.schemas import SourceBody
from server.api.service import Service
from server.errors import InvalidRequest
from server.publishing.directories import opened_artifact

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

# Bytes that a multipart body may have beside its file.
FORM_OVERHEAD_BYTES = 64 << 10
FORM = "multipart/form-data"
FIELD = "file"
CONTENT_DIGEST = "Content-Digest"
SHA256 = "sha-256"
# Its member of the header: 32 bytes in base64, whose padding a recipient has to do without.
DIGEST = re.compile(rf"(?:^|,)[ \t]*{SHA256}=:([A-Za-z0-9+/]{{43}})=?:[ \t]*(?=$|[,;])")

_source_body = json_body(SourceBody)


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
    await check_visibility(service, destination)
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


async def publish_source(request: Request, service: Service, destination: Destination) -> Publication:
    """Publish the artifact at the path that the request's body names, and count the outcome.

    Raises:
        InvalidRequest, UsageError: no path that this server publishes from.
        PeraxisError: as `receive_upload` does of the same bytes.
    """
    source = (await _source_body(request)).source
    check_names(destination.tenant.name, destination.name)
    await check_visibility(service, destination)
    # Refuse while no base was ever loaded: without one, no artifact can be checked.
    _ = service.engine.facts
    async with service.in_background(opened_artifact(source, service.settings.source_dir)) as descriptor:
        return await while_connected(request, publish_file(service, destination, descriptor))


def _check_headers(request: Request, max_bytes: int) -> None:
    media_type = media_type_of(request)
    if media_type not in ("", "application/octet-stream", FORM):
        raise InvalidRequest(
            f"an artifact cannot be sent as {media_type}: set Content-Type to application/octet-stream, "
            "or send a multipart/form-data field called file",
            "Content-Type",
        )
    check_encoding(request)
    # uvicorn has checked that Content-Length is a number.
    length = int(request.headers.get("content-length", "0"))
    overhead = FORM_OVERHEAD_BYTES if media_type == FORM else 0
    if length > max_bytes + overhead:
        check_size(length, max_bytes, "upload")


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
        field = FileField(request.headers["content-type"])
        async for chunk in body:
            form_hash.update(chunk)
            for data in field.feed(chunk):
                yield data
        field.finish()


def _check_digest(sealed: SealedUpload, form_hash: Hash | None, expected: str | None) -> None:
    found = form_hash.hexdigest() if form_hash else sealed.digest
    if expected is not None and found != expected:
        raise ArtifactError(
            f"the upload has SHA-256 {found}, and its {CONTENT_DIGEST} is {expected}: send it again"
        )


class FileField:
    """Incremental parser of multipart/form-data: takes the body in chunks and returns the bytes of its one field.

    It holds one network chunk, never the file.
    """

    def __init__(self, content_type: str) -> None:
        """Raise InvalidRequest if the header names no valid boundary."""
        boundary = parse_options_header(content_type)[1].get(b"boundary")
        if not boundary:
            raise InvalidRequest(
                "the multipart body has no boundary: let the HTTP client set Content-Type", FIELD
            )
        self._headers: dict[bytes, bytes] = {}
        self._header = [b"", b""]
        self._num_parts = 0
        self._data: list[bytes] = []
        self._complete = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_header_field": lambda data, start, end: self._add_to_header(0, data[start:end]),
                    "on_header_value": lambda data, start, end: self._add_to_header(1, data[start:end]),
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._begin_part,
                    "on_part_data": lambda data, start, end: self._data.append(data[start:end]),
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise InvalidRequest(f"the multipart boundary cannot be used: {error}", FIELD) from error

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the file's bytes in this chunk; raise InvalidRequest for invalid multipart data or another field."""
        self._data = []
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise InvalidRequest(f"the multipart body cannot be read: {error}", FIELD) from error
        return self._data

    def finish(self) -> None:
        """Raise InvalidRequest unless the body is complete and held the file."""
        if not self._complete:
            raise InvalidRequest("the multipart body ends before its closing boundary: send it again", FIELD)
        if not self._num_parts:
            raise InvalidRequest(f"the multipart body has no field: send the artifact as {FIELD!r}", FIELD)

    def _add_to_header(self, side: int, data: bytes) -> None:
        self._header[side] += data

    def _end_header(self) -> None:
        name, value = self._header
        self._headers[name.lower()] = value
        self._header = [b"", b""]

    def _begin_part(self) -> None:
        name = parse_options_header(self._headers.get(b"content-disposition"))[1].get(b"name", b"")
        self._headers = {}
        self._num_parts += 1
        if name != FIELD.encode() or self._num_parts > 1:
            shown = name.decode("utf-8", "replace")
            raise InvalidRequest(
                f"the form has a field {shown!r}: send one field, {FIELD!r}, and no other", shown
            )

    def _end(self) -> None:
        self._complete = True


def expected_sha256(request: Request) -> str | None:
    """Return the SHA-256 of the request's content in hex, from the `Content-Digest` of its sender (RFC 9530).

    Returns:
        None if the header is missing or names no SHA-256: the RFC lets a recipient ignore other algorithms.

    Raises:
        InvalidRequest: its SHA-256 is none.
    """
    header = ",".join(request.headers.getlist(CONTENT_DIGEST))
    if SHA256 not in header.lower():
        return None
    found = DIGEST.findall(header)
    if not found:
        raise _malformed_digest()
    # Of repeated ones the last counts.
    return base64.b64decode(f"{found[-1]}=").hex()


def _malformed_digest() -> InvalidRequest:
    return InvalidRequest(
        f"the {SHA256} of {CONTENT_DIGEST} is malformed: send {SHA256}=:BASE64:, the content's SHA-256, as RFC 9530 "
        "describes it",
        CONTENT_DIGEST,
    )
