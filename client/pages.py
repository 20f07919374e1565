"""Lists that a server answers a page at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from client.http import RemoteServer, parsed, unexpected


class PageReply(msgspec.Struct, frozen=True):
    """The fields of every page."""

    has_more: bool = False
    last_id: str | None = None


def whole_list(server: RemoteServer, path: str, key: str, params: Mapping[str, str] | None = None) -> bytes:
    """Ask for all pages of a list; return one document, the first page's with the entries of all.

    Args:
        server: The server.
        path: The route.
        key: The name of the list in a page.
        params: Of each call.

    Raises:
        NoAnswer, ServerRefused, UnexpectedReply: A call failed.
    """
    pages = _pages(server, path, key, params or {})
    document = next(pages)
    for page in pages:
        document[key] += page[key]
    return json.dumps(document).encode()


def _pages(server: RemoteServer, path: str, key: str, params: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    after: dict[str, str] = {}
    while True:
        content = server.call("GET", path, params={**params, **after})
        reply, document = parsed(content, PageReply), parsed(content, dict[str, Any])
        if not isinstance(document.get(key), list):
            raise unexpected(f"it has no list {key!r}")
        # They are of the page.
        document.pop("has_more", None)
        document.pop("last_id", None)
        yield document
        if not reply.has_more:
            return
        if reply.last_id is None or reply.last_id == after.get("after"):
            raise unexpected("the next page of the list begins where this one began")
        after = {"after": reply.last_id}
