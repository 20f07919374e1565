"""The console: the page `/` and its files, which need no key. The calls that it makes need one as all calls do.

The files lie in `server/console`, as a browser gets them; nothing builds them. The page loads nothing of another host,
and its policy lets no script run that is not one of these files.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

DIRECTORY = Path(__file__).resolve().parents[1] / "console"
PAGE = "index.html"
MEDIA_TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # Asked again each time, and answered with 304: an upgraded server must not meet the page of the one before.
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}

router = APIRouter()


@router.get("/")
async def console_page(request: Request) -> Response:
    """Send the console, a page that shows and operates this server by its other calls."""
    return _reply(request, PAGE)


@router.get("/console/{asset}")
async def console_asset(asset: str, request: Request) -> Response:
    """Send a file of the console."""
    if asset == PAGE or asset not in _files():
        raise HTTPException(404)
    return _reply(request, asset)


@dataclass(frozen=True, slots=True)
class ConsoleFile:
    """One file, as it is and compressed."""

    content: bytes
    compressed: bytes
    media_type: str
    etag: str


@cache
def _files() -> Mapping[str, ConsoleFile]:
    """Read the console's files, by name; each process does so once."""
    found = {path.name: path for path in DIRECTORY.iterdir() if path.suffix in MEDIA_TYPES}
    return {name: _read(path) for name, path in found.items()}


def _read(path: Path) -> ConsoleFile:
    content = path.read_bytes()
    compressed = gzip.compress(content, mtime=0)
    return ConsoleFile(
        content, compressed, MEDIA_TYPES[path.suffix], f'W/"{hashlib.sha256(content).hexdigest()[:32]}"'
    )


def _reply(request: Request, name: str) -> Response:
    file = _files()[name]
    headers = {**HEADERS, "ETag": file.etag}
    if file.etag in (tag.strip() for tag in request.headers.get("if-none-match", "").split(",")):
        return Response(status_code=304, headers=headers)
    accepted = {
        each.partition(";")[0].strip() for each in request.headers.get("accept-encoding", "").split(",")
    }
    if "gzip" not in accepted:
        return Response(file.content, headers=headers, media_type=file.media_type)
    return Response(
        file.compressed, headers={**headers, "Content-Encoding": "gzip"}, media_type=file.media_type
    )
