"""Parse `Range` headers, and describe what of a file a reply sends. Knows no file."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.exceptions import HTTPException

from deltastore.registry.uploads import CHUNK_BYTES
from server.errors import InvalidRequest

RANGES = re.compile(r"bytes=\s*(?:\d+-\d*|-\d+)(?:\s*,\s*(?:\d+-\d*|-\d+))*\s*", re.ASCII | re.IGNORECASE)
MAX_HEADER = 1024
# A request for more ranges gets the whole file.
MAX_RANGES = 100
# Bytes that are read and hashed for the ranges of one request beyond those that are sent: chunks are verified whole.
MAX_UNSENT_BYTES = 16 * CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class Part:
    """A range of a file in a reply's body, and the bytes that stand before it."""

    head: bytes
    range: range  # bytes of the file; not empty


@dataclass(frozen=True, slots=True)
class Selection:
    """The body of a reply that sends a file, whole or in ranges, and the headers that depend on it."""

    status: int
    headers: dict[str, str]
    parts: Sequence[Part]
    tail: bytes = b""


def select(header: str | None, size_bytes: int, media_type: str) -> Selection:
    """Return what a `Range` header selects of a file of `size_bytes`; without a header, the whole file.

    Raises:
        InvalidRequest: The header is malformed.
        HTTPException: 416, a range begins past the end.
    """
    ranges = [] if header is None else _parse(header, size_bytes)
    if not 0 < len(ranges) <= MAX_RANGES or _is_sparse(ranges := _merged(ranges)):
        headers = {"Content-Type": media_type, "Content-Length": str(size_bytes)}
        return Selection(200, headers, [Part(b"", range(size_bytes))])
    if len(ranges) > 1:
        return _multipart(ranges, size_bytes, media_type)
    headers = {
        "Content-Type": media_type,
        "Content-Length": str(len(ranges[0])),
        "Content-Range": _content_range(ranges[0], size_bytes),
    }
    return Selection(206, headers, [Part(b"", ranges[0])])


def _parse(header: str, size_bytes: int) -> list[range]:
    if len(header) > MAX_HEADER or not RANGES.fullmatch(header):
        raise InvalidRequest(f"Range must be bytes=FIRST-LAST, got {header[:80]!r}", "Range")
    ranges = []
    for first, last in re.findall(r"(\d*)-(\d*)", header):
        begin = int(first) if first else size_bytes - int(last)
        if begin >= size_bytes:
            raise HTTPException(
                416, f"the artifact has {size_bytes} bytes", {"Content-Range": f"bytes */{size_bytes}"}
            )
        if first and last and int(last) < begin:
            raise InvalidRequest(f"Range must not end before it begins, got {header[:80]!r}", "Range")
        end = min(int(last) + 1, size_bytes) if first and last else size_bytes
        ranges.append(range(max(begin, 0), end))
    return ranges


def _merged(ranges: list[range]) -> list[range]:
    """Sort ranges and join those that overlap or touch, so that no byte is sent twice."""
    merged: list[range] = []
    for each in sorted(ranges, key=lambda each: each.start):
        if merged and each.start <= merged[-1].stop:
            merged[-1] = range(merged[-1].start, max(merged[-1].stop, each.stop))
        else:
            merged.append(each)
    return merged


def _is_sparse(ranges: list[range]) -> bool:
    """True if far more bytes must be read than are sent."""
    chunks = {
        chunk
        for each in ranges
        for chunk in range(each.start // CHUNK_BYTES, (each.stop - 1) // CHUNK_BYTES + 1)
    }
    return len(chunks) * CHUNK_BYTES > sum(map(len, ranges)) + MAX_UNSENT_BYTES


def _multipart(ranges: list[range], size_bytes: int, media_type: str) -> Selection:
    boundary = secrets.token_hex(13)
    parts = []
    for index, each in enumerate(ranges):
        head = f"--{boundary}\r\nContent-Type: {media_type}\r\n"
        head += f"Content-Range: {_content_range(each, size_bytes)}\r\n\r\n"
        parts.append(Part(("\r\n" * (index > 0) + head).encode(), each))
    tail = f"\r\n--{boundary}--\r\n".encode()
    length = sum(len(part.head) + len(part.range) for part in parts) + len(tail)
    headers = {
        "Content-Type": f"multipart/byteranges; boundary={boundary}",
        "Content-Length": str(length),
    }
    return Selection(206, headers, parts, tail)


def _content_range(each: range, size_bytes: int) -> str:
    return f"bytes {each.start}-{each.stop - 1}/{size_bytes}"
