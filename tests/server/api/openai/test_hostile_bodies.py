"""Bodies that no client of good will sends, on every route that takes a prompt, tokens or messages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.helpers.live_server import LiveServer, connection, error_of, eventually

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "plain", "prompt": "hello", "max_tokens": 1},
    "/v1/chat/completions": {"model": "chatty", "messages": MESSAGES, "max_tokens": 1},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [1]},
}
JSON = {"Content-Type": "application/json"}
MILLION = 1_000_000

every_route = pytest.mark.parametrize("route", BODIES)


def refused(
    server: LiveServer, route: str, content: bytes, media_type: str = "application/json"
) -> str | None:
    """Send a body that must be refused as invalid; return the field that the error names."""
    reply = server.client.post(route, content=content, headers={"Content-Type": media_type})
    assert reply.status_code == 400, reply.text[:500]
    error = error_of(reply)
    assert error["code"] == "invalid_request"
    assert len(error["message"]) < 500
    assert server.client.post(route, json=BODIES[route]).status_code == 200
    param: str | None = error["param"]
    return param


@every_route
@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_body_of_another_type_is_refused(server: LiveServer, route: str, media_type: str) -> None:
    assert refused(server, route, json.dumps(BODIES[route]).encode(), media_type) == "Content-Type"


@every_route
def test_text_that_is_not_utf_8_is_refused(server: LiveServer, route: str) -> None:
    refused(server, route, json.dumps({**BODIES[route], "model": "X"}).encode().replace(b"X", b"\xff\xfe"))


@every_route
@pytest.mark.parametrize(
    "content", [b"", b"null", b"[]", b"5", b'{"model": "plain"', b"{}", b'{"model": NaN}']
)
def test_what_is_no_object_of_the_route_is_refused(server: LiveServer, route: str, content: bytes) -> None:
    refused(server, route, content)


@every_route
@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_deep_json_is_refused(server: LiveServer, route: str, opening: bytes) -> None:
    known = {"/tokenize": b"prompt", "/detokenize": b"tokens"}.get(route, b"logit_bias")
    for field in (known, b"a_field_of_tomorrow"):
        refused(server, route, b'{"model": "base", "%s": %s' % (field, opening * MILLION))


@every_route
def test_a_hundred_megabytes_are_refused_before_they_are_read(server: LiveServer, route: str) -> None:
    head = f"POST {route} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
    with connection(server.url) as raw:
        raw.sendall(f"{head}Content-Length: {100 * MILLION}\r\n\r\n".encode() + b'{"prompt": "')
        assert b" 413 " in raw.recv(65536)


@every_route
def test_a_chunked_body_that_is_cut_off_ends_its_request_alone(server: LiveServer, route: str) -> None:
    def closed() -> float:
        return server.metric("http_requests_total", route=route, code="499")

    before = closed()
    head = f"POST {route} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
    with connection(server.url) as raw:
        raw.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n400\r\n".encode() + b'{"model": ')
    assert eventually(lambda: closed() == before + 1)
    assert server.client.post(route, json=BODIES[route]).status_code == 200


@pytest.mark.parametrize("item", [b'"a"', b"[1]", b"[]", b"1", b'{"type":"text"}', b"null"])
def test_a_million_items_are_refused(server: LiveServer, item: bytes) -> None:
    items = b",".join([item] * MILLION)[: 8 * MILLION].rpartition(b",")[0]
    for route, field in (("/v1/completions", b"prompt"), ("/v1/chat/completions", b"messages")):
        assert refused(server, route, b'{"model": "plain", "%s": [%s]}' % (field, items)) == field.decode()
