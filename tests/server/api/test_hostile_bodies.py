"""Bodies that no client of good will sends, on every route that takes a prompt, tokens or messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.server.helpers.live_server import LiveServer, connection, error_of, eventually
from tests.server.supervisor.test_faults import HTTP, processes

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
    assert error["code"] in ("invalid_request", "context_length_exceeded")
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
    head = f"POST {route} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with connection(server.url) as raw:
        raw.sendall(f"{head}Content-Length: {100 * MILLION}\r\n\r\n".encode() + b'{"prompt": "')
        assert b" 413 " in raw.recv(65536)


@every_route
def test_a_chunked_body_that_is_cut_off_ends_its_request_alone(server: LiveServer, route: str) -> None:
    def closed() -> float:
        return server.metric("http_requests_total", route=route, code="499")

    before = closed()
    head = f"POST {route} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with connection(server.url) as raw:
        raw.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n400\r\n".encode() + b'{"model": ')
    assert eventually(lambda: closed() == before + 1)
    assert server.client.post(route, json=BODIES[route]).status_code == 200


@pytest.mark.parametrize("item", [b'"a"', b"[1]", b"[]", b"1", b'{"type":"text"}', b"null"])
def test_a_million_items_are_refused(server: LiveServer, item: bytes) -> None:
    items = b",".join([item] * MILLION)[: 8 * MILLION].rpartition(b",")[0]
    for route, field in (("/v1/completions", b"prompt"), ("/v1/chat/completions", b"messages")):
        param = refused(server, route, b'{"model": "plain", "%s": [%s]}' % (field, items))
        # No field is looked for in a large body with too many arrays, objects and strings.
        assert param == (field.decode() if item in (b"1", b"null") else None)


def tools(parameters: bytes) -> bytes:
    return b'[{"type": "function", "function": {"name": "f", "parameters": {"a": %s}}}]' % parameters


def calls(arguments: bytes) -> bytes:
    call = b'{"id": "1", "type": "function", "function": {"name": "f", "arguments": "%s"}}' % arguments
    return b'[{"role": "assistant", "tool_calls": [%s]}, {"role": "user", "content": "hi"}]' % call


@pytest.mark.parametrize("value", [b"[]", b"{}", b'""', b"1"])
@pytest.mark.parametrize(
    ("field", "of"),
    [
        ("tools", tools),
        ("messages", calls),
        (
            "response_format",
            b'{"type": "json_schema", "json_schema": {"name": "s", "schema": {"a": %s}}}'.__mod__,
        ),
        ("logit_bias", b"%s".__mod__),
        ("a_field_of_tomorrow", b"%s".__mod__),
    ],
)
def test_values_that_a_route_does_not_type_are_bounded(
    server: LiveServer, field: str, of: Callable[[bytes], bytes], value: bytes
) -> None:
    """Parsed, each of these bodies would take up to half a gigabyte."""
    items = b"[%s]" % b",".join([value] * (3 * MILLION // 2))
    if field == "messages":
        items = items.replace(b'"', b'\\"')
    if value == b"1" and field == "messages":
        pytest.skip("numbers in a text are not counted: eight million take what a body does")
    fields = {
        "model": b'"chatty"',
        "messages": json.dumps(MESSAGES).encode(),
        "max_tokens": b"1",
        field: of(items),
    }
    body = b"{%s}" % b",".join(b'"%s": %s' % (name.encode(), value) for name, value in fields.items())
    body = body[: 8 << 20] if len(body) > 8 << 20 else body
    param = refused(server, "/v1/chat/completions", body)
    # No field is looked for in a large body with too many arrays, objects and strings.
    is_named = field == "messages" or (value == b"1" and field != "a_field_of_tomorrow")
    assert param == (field if is_named else None)


def test_a_long_text_full_of_code_is_no_hostile_body(server: LiveServer) -> None:
    code = 'value = {"a": [1, "\\\\", {}]}  # "[{\n' * 60_000
    reply = server.client.post("/tokenize", json={"model": "base", "prompt": code})
    # Too many tokens, and not too many values.
    assert reply.status_code == 400
    assert "tokens" in error_of(reply)["message"]
    conversation = [{"role": "user", "content": [{"type": "text", "text": "["}] * 5}] * 4000
    reply = server.client.post("/v1/chat/completions", json={"model": "chatty", "messages": conversation})
    assert reply.status_code == 400
    assert "tokens" in error_of(reply)["message"]


def test_prompts_of_a_hundred_thousand_ids_are_read(server: LiveServer) -> None:
    for route, field in (("/v1/completions", "prompt"), ("/detokenize", "tokens")):
        reply = server.client.post(route, json={"model": "base", field: [1] * 131_072})
        assert reply.status_code == 400
        assert "131072 tokens" in error_of(reply)["message"]


def test_nothing_keeps_a_body_until_its_answer_has_ended(server: LiveServer) -> None:
    """A template does not show a message's name, so that a large one fits."""
    [process] = processes(server, HTTP)
    large = [{"role": "user", "content": "hi", "name": "x" * (7 << 20)}]
    body = {"model": "chatty", "messages": large, "stream": True, "max_tokens": 3000, "temperature": 1.5}
    body["logit_bias"] = {}
    with ExitStack() as streams:

        def stream() -> None:
            reply = streams.enter_context(server.client.stream("POST", "/v1/chat/completions", json=body))
            assert reply.status_code == 200
            replies.append(reply.iter_bytes())
            next(replies[-1])

        replies: list[Iterator[bytes]] = []
        stream()
        before = process.memory_info().rss
        for _ in range(12):
            stream()
        assert process.memory_info().rss - before < 6 * (7 << 20)
