"""Check `Range` headers, so that a refusal has the shape of every other error. Starlette sends the ranges."""

from __future__ import annotations

import re

from starlette.exceptions import HTTPException

from server.errors import InvalidRequest

RANGES = re.compile(r"bytes=\s*(?:\d+-\d*|-\d+)(?:\s*,\s*(?:\d+-\d*|-\d+))*\s*", re.ASCII | re.IGNORECASE)
MAX_HEADER = 1024


def check_range(header: str | None, size_bytes: int) -> None:
    """Raise InvalidRequest for a malformed header, and HTTPException 416 for a range that begins past the end."""
    if header is None:
        return
    if len(header) > MAX_HEADER or not RANGES.fullmatch(header):
        raise InvalidRequest(f"Range must be bytes=FIRST-LAST, got {header[:80]!r}", "Range")
    for first, last in re.findall(r"(\d*)-(\d*)", header):
        begin = int(first) if first else size_bytes - int(last)
        if begin >= size_bytes:
            raise HTTPException(
                416, f"the artifact has {size_bytes} bytes", {"Content-Range": f"bytes */{size_bytes}"}
            )
        if first and last and int(last) < begin:
            raise InvalidRequest(f"Range must not end before it begins, got {header[:80]!r}", "Range")
