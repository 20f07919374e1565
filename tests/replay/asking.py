"""HTTP calls whose replies are kept whole: status, headers and body, or each event of a stream."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx

from tests.replay.transcript import Transcript, steady

# Headers whose values change with times and with sizes of documents that hold times.
VARIABLE_HEADERS = {"content-length", "date", "last-modified", "retry-after", "x-request-id"}
CALL_S = 180.0
OCTETS = {"Content-Type": "application/octet-stream"}


class Asker:
    """Asks one server and writes what it answers into a transcript.

    Args:
        url: of the server's public port, or of the admin port.
        keys: the text of each key by the name of its role; the empty name has none.
    """

    def __init__(self, transcript: Transcript, url: str, keys: Mapping[str, str]) -> None:
        self.transcript = transcript
        self.url = url
        self.keys = keys
        self.client = httpx.Client(base_url=url, timeout=CALL_S)

    def headers(self, role: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.keys[role]}"} if self.keys.get(role) else {}

    def send(
        self, role: str, method: str, path: str, headers: Mapping[str, str] | None = None, **body: Any
    ) -> httpx.Response:
        """Make a call that is not kept."""
        return self.client.request(method, path, headers={**self.headers(role), **(headers or {})}, **body)

    def ask(
        self,
        title: str,
        role: str,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        **body: Any,
    ) -> httpx.Response:
        """Make a call, and keep its reply under a title."""
        reply = self.send(role, method, path, headers, **body)
        self.transcript.add(f"{title}: {method} {path.partition('?')[0]} [{role or 'no key'}]", kept(reply))
        return reply


def kept(reply: httpx.Response) -> str:
    """Return a reply as text."""
    head = [f"{reply.status_code}"]
    for name, value in sorted(reply.headers.items()):
        is_variable = name in VARIABLE_HEADERS or name.startswith("x-ratelimit-re")
        head.append(f"{name}: {'...' if is_variable else value}")
    return "\n".join([*head, "", *_body(reply)])


def _body(reply: httpx.Response) -> list[str]:
    content_type = reply.headers.get("content-type", "")
    if content_type.startswith("application/json"):
        return json.dumps(steady(reply.json()), indent=1).splitlines()
    if content_type.startswith("text/event-stream"):
        return [_event_line(line) for line in reply.text.splitlines()]
    if content_type.startswith("text/"):
        return reply.text.splitlines()
    return [f"{len(reply.content)} bytes"]


def _event_line(line: str) -> str:
    kind, _, data = line.partition(": ")
    if kind != "data" or not data.startswith("{"):
        return line
    return f"data: {json.dumps(steady(json.loads(data)))}"
