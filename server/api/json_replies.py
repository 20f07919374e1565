"""JSON in replies and server-sent events, encoded by msgspec, and whole replies sent in pieces."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from server.fair_budget import FairBudget

# Bytes that are handed to the web server at once; the rest of a reply waits until the client has taken them.
PIECE_BYTES = 64 << 10

# Bound on the documents of one page of a list; the first of them may be larger.
MAX_PAGE_BYTES = 1 << 20


def install(app: FastAPI, unsent: FairBudget) -> None:
    """Give the application's whole replies a budget of bytes that clients have not read."""
    app.state.unsent = unsent


class WholeReply(Response):
    """A reply whose body is made at once. A large one is counted until the client has taken its last piece."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the reply; raises QueueFull before its first byte if its tenant leaves too much unread."""
        if len(self.body) <= PIECE_BYTES:
            await super().__call__(scope, receive, send)
            return
        unsent: FairBudget = scope["app"].state.unsent
        with unsent.holding(scope["state"].get("tenant", ""), len(self.body)):
            await StreamingResponse(_pieces(self.body), self.status_code, self.headers)(scope, receive, send)


class JsonReply(WholeReply):
    """A reply with a JSON document, in which NaN is null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode(content)


def shared_reply(content: bytes, media_type: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return a reply of bytes that the process keeps for all clients: they count for none."""
    length = {"Content-Length": str(len(content))}
    return StreamingResponse(_pieces(content), headers={**length, **(headers or {})}, media_type=media_type)


async def _pieces(content: bytes | memoryview) -> AsyncIterator[bytes]:
    for begin in range(0, len(content), PIECE_BYTES):
        yield bytes(content[begin : begin + PIECE_BYTES])


def page_reply(
    key: str,
    documents: Iterable[tuple[str, Any]],
    *,
    has_more: bool,
    last_id: str | None = None,
    **fields: Any,
) -> JsonReply:
    """Return a page of a list, with the fields that OpenAI's API gives one: `has_more` and `last_id`.

    Args:
        key: the name of the list.
        documents: those of the page, each with its id. Only as many as fit into `MAX_PAGE_BYTES` are taken.
        has_more: there are others behind them.
        last_id: what the next page begins behind, if that is not the last document.
        fields: of the reply beside the list.
    """
    shown: list[msgspec.Raw] = []
    num_bytes, last_shown = 0, None
    for document_id, document in documents:
        encoded = encode(document)
        num_bytes += len(encoded)
        if shown and num_bytes > MAX_PAGE_BYTES:
            has_more, last_id = True, None
            break
        shown.append(msgspec.Raw(encoded))
        last_shown = document_id
    last_id = last_shown if last_id is None else last_id
    return JsonReply({**fields, key: shown, "has_more": has_more, "last_id": last_id})


def encode(document: Any) -> bytes:
    """Return a document as JSON in UTF-8."""
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError:
        # A client's field name can hold a lone surrogate, which UTF-8 cannot encode and an escape can.
        return json.dumps(document).encode()


def server_sent_event(name: str, document: Any) -> bytes:
    """Return one server-sent event with a JSON document."""
    return b"event: %s\n%s" % (name.encode(), unnamed_event(document))


def unnamed_event(document: Any) -> bytes:
    """Return one server-sent event that has a JSON document and no name, as those of OpenAI's API."""
    return b"data: %s\n\n" % encode(document)
