"""Receive one upload: the artifact in the body of a request, raw or as a form's file, and its `Content-Digest`.

`publishing.py` writes, checks and publishes what arrives.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from deltastore.errors import ArtifactError, ArtifactTooLarge
from deltastore.registry import Publication
from deltastore.registry.records import check_names
from deltastore.registry.uploads import SealedUpload
from server.api.json_io import media_type_of, timed_chunks
from server.api.outputs import while_connected
from server.api.publishing import (
    Destination,
    check,
    counted,
    counted_upload,
    gathered,
    one_more_upload,
    publish,
    sealed_upload,
)
from server.api.service import Service
from server.errors import InvalidRequest

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

# Bytes that a multipart body may have beside its file.
FORM_OVERHEAD_BYTES = 64 << 10
FORM = "multipart/form-data"
FIELD = "file"
CONTENT_DIGEST = "Content-Digest"
SHA256 = "sha-256"
SHA256_BYTES = 32
# A member of a structured field's dictionary (RFC 9651) whose value is a byte sequence. Each quantifier ends at a
# character that the next one cannot match, so that a hostile header costs no more than its length.
DIGEST_MEMBER = re.compile(
    r'([a-z*][a-z0-9_.*-]*)=:([A-Za-z0-9+/]*={0,2}):(?:;[ ]*[a-z*][a-z0-9_.*-]*(?:=(?:"[^"\\]*"|[^ \t,;"]+))?)*'
)
DIGEST_SEPARATOR = re.compile(r"[ \t]*,[ \t]*")


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
        None without the header, or if it has only other algorithms, which the RFC lets a recipient ignore.

    Raises:
        InvalidRequest: the header is malformed, or its SHA-256 is not one.
    """
    header = ",".join(request.headers.getlist(CONTENT_DIGEST)).strip(" \t")
    digest = _digests(header).get(SHA256) if header else None
    if digest is None:
        return None
    if len(digest) != SHA256_BYTES:
        raise InvalidRequest(
            f"the {SHA256} of {CONTENT_DIGEST} has {len(digest)} bytes, not {SHA256_BYTES}: "
            f"send {SHA256}=:BASE64:, the content's SHA-256",
            CONTENT_DIGEST,
        )
    return digest.hex()


def _digests(header: str) -> dict[str, bytes]:
    """Return the digest of each algorithm; of repeated ones the last, as the RFC has it."""
    members, position = {}, 0
    while True:
        found = DIGEST_MEMBER.match(header, position)
        if found is None:
            raise _malformed_digest()
        members[found[1]] = _decoded(found[2])
        if found.end() == len(header):
            return members
        separator = DIGEST_SEPARATOR.match(header, found.end())
        if separator is None:
            raise _malformed_digest()
        position = separator.end()


def _decoded(text: str) -> bytes:
    # RFC 9651 asks recipients to accept a byte sequence without its padding.
    bare = text.rstrip("=")
    try:
        return base64.b64decode(bare + "=" * (-len(bare) % 4), validate=True)
    except binascii.Error as error:
        raise _malformed_digest() from error


def _malformed_digest() -> InvalidRequest:
    return InvalidRequest(
        f"{CONTENT_DIGEST} is malformed: send {SHA256}=:BASE64:, the content's SHA-256, as RFC 9530 describes it",
        CONTENT_DIGEST,
    )
