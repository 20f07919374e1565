"""The `Content-Digest` of a request (RFC 9530): read the header. Compares nothing."""

from __future__ import annotations

import base64
import binascii
import re

from fastapi import Request

from server.errors import InvalidRequest

HEADER = "Content-Digest"
ALGORITHM = "sha-256"
SHA256_BYTES = 32
# A member of a structured field's dictionary (RFC 9651) whose value is a byte sequence. Each quantifier ends at a
# character that the next one cannot match, so that a hostile header costs no more than its length.
MEMBER = re.compile(
    r'([a-z*][a-z0-9_.*-]*)=:([A-Za-z0-9+/]*={0,2}):(?:;[ ]*[a-z*][a-z0-9_.*-]*(?:=(?:"[^"\\]*"|[^ \t,;"]+))?)*'
)
SEPARATOR = re.compile(r"[ \t]*,[ \t]*")


def expected_sha256(request: Request) -> str | None:
    """Return the SHA-256 of the request's content in hex, as its sender computed it.

    Returns:
        None without the header, or if it has only other algorithms, which the RFC lets a recipient ignore.

    Raises:
        InvalidRequest: the header is malformed, or its SHA-256 is not one.
    """
    header = ",".join(request.headers.getlist(HEADER)).strip(" \t")
    digest = _members(header).get(ALGORITHM) if header else None
    if digest is None:
        return None
    if len(digest) != SHA256_BYTES:
        raise InvalidRequest(
            f"the {ALGORITHM} of {HEADER} has {len(digest)} bytes, not {SHA256_BYTES}: "
            f"send {ALGORITHM}=:BASE64:, the content's SHA-256",
            HEADER,
        )
    return digest.hex()


def _members(header: str) -> dict[str, bytes]:
    """Return the digest of each algorithm; of repeated ones the last, as the RFC has it."""
    members, position = {}, 0
    while True:
        found = MEMBER.match(header, position)
        if found is None:
            raise _malformed()
        members[found[1]] = _decoded(found[2])
        if found.end() == len(header):
            return members
        separator = SEPARATOR.match(header, found.end())
        if separator is None:
            raise _malformed()
        position = separator.end()


def _decoded(text: str) -> bytes:
    # RFC 9651 asks recipients to accept a byte sequence without its padding.
    bare = text.rstrip("=")
    try:
        return base64.b64decode(bare + "=" * (-len(bare) % 4), validate=True)
    except binascii.Error as error:
        raise _malformed() from error


def _malformed() -> InvalidRequest:
    return InvalidRequest(
        f"{HEADER} is malformed: send {ALGORITHM}=:BASE64:, the content's SHA-256, as RFC 9530 describes it",
        HEADER,
    )
