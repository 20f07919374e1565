"""JSON in replies and server-sent events, encoded by msgspec. Knows no route."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from fastapi.responses import Response


class JsonReply(Response):
    """A reply with a JSON document, in which NaN is null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode(content)


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
