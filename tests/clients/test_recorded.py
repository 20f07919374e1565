"""Requests of stock clients, replayed byte for byte; `python -m tests.clients.record` records them anew."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from tests.clients.helpers.environments import PINS, ROOT
from tests.clients.helpers.relay import BUFFER_BYTES, requests_in, scrubbed
from tests.clients.helpers.sessions import CLIENTS, RECORDED, num_cancelled
from tests.server.helpers.live_server import LiveServer, connection, eventually

STEPS = {"models", "chat", "stream", "tools", "schema", "too-long", "cancel"}


def step_of(path: Path) -> str:
    return path.stem.rpartition("-")[0]


def recorded_in(*steps: str) -> pytest.MarkDecorator:
    """Return a parameter `path` of a test: the requests that clients sent in some steps."""
    paths = [path for path in sorted(RECORDED.glob("*/*.http")) if step_of(path) in steps]
    return pytest.mark.parametrize("path", paths, ids=lambda path: f"{path.parent.name}-{path.stem}")


@contextmanager
def reply_to(server: LiveServer, request: bytes) -> Iterator[HTTPResponse]:
    """Send a request as it is and yield the reply; leaving the block disconnects."""
    with connection(server.url) as stream:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        stream.sendall(request)
        with HTTPResponse(stream, method=request.partition(b" ")[0].decode()) as reply:
            reply.begin()
            yield reply


def asked(request: bytes) -> Any:
    return json.loads(request.partition(b"\r\n\r\n")[2])


def message_of(content: str) -> dict[str, Any]:
    """Return the message of a whole or a streamed chat."""
    if not content.startswith("data: "):
        message: dict[str, Any] = json.loads(content)["choices"][0]["message"]
        return message
    *events, end = [line.removeprefix("data: ") for line in content.splitlines() if line.startswith("data: ")]
    assert end == "[DONE]"
    deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
    calls: dict[int, dict[str, str]] = {}
    for part in (part for delta in deltas for part in delta.get("tool_calls", ())):
        function = calls.setdefault(part["index"], {"name": "", "arguments": ""})
        for key, text in part["function"].items():
            function[key] += text
    return {
        "content": "".join(delta.get("content") or "" for delta in deltas),
        "tool_calls": [{"function": function} for function in calls.values()],
    }


def test_each_client_has_recorded_each_step() -> None:
    assert {path.name: {step_of(file) for file in path.iterdir()} for path in RECORDED.iterdir()} == {
        client.name: STEPS | ({"beside"} if client.calls_beside_schema else set()) for client in CLIENTS
    }


@recorded_in("models")
def test_a_recorded_client_is_told_the_models(server: LiveServer, path: Path) -> None:
    with reply_to(server, path.read_bytes()) as reply:
        assert reply.status == 200
        assert {"base", "chatty"} <= {card["id"] for card in json.loads(reply.read())["data"]}


@recorded_in("chat", "stream", "tools", "schema", "beside")
def test_a_recorded_chat_is_answered(server: LiveServer, path: Path) -> None:
    request = path.read_bytes()
    fields = asked(request)
    with reply_to(server, request) as reply:
        content = reply.read().decode()
    assert reply.status == 200, content
    assert content.startswith("data: ") == fields.get("stream", False)
    message = message_of(content)
    # Beside a schema, the first answer is a call.
    if fields.get("tool_choice", "auto") not in ("auto", "none") or path.stem == "beside-1":
        functions = {tool["function"]["name"]: tool["function"] for tool in fields["tools"]}
        assert message["tool_calls"]
        for call in message["tool_calls"]:
            schema = functions[call["function"]["name"]]["parameters"]
            jsonschema_rs.validate(schema, json.loads(call["function"]["arguments"]))
    elif "response_format" in fields:
        jsonschema_rs.validate(
            fields["response_format"]["json_schema"]["schema"], json.loads(message["content"])
        )
    else:
        assert message["content"]


@recorded_in("too-long")
def test_a_recorded_prompt_that_is_too_long_is_refused(server: LiveServer, path: Path) -> None:
    with reply_to(server, path.read_bytes()) as reply:
        assert (reply.status, json.loads(reply.read())["error"]["code"]) == (400, "context_length_exceeded")


@recorded_in("cancel")
def test_a_recorded_client_that_leaves_its_stream_ends_the_request(server: LiveServer, path: Path) -> None:
    before = num_cancelled(server)
    with reply_to(server, path.read_bytes()) as reply:
        assert reply.status == 200
        assert reply.readline().startswith(b"data: ")
    assert eventually(lambda: num_cancelled(server) > before)


def test_the_page_of_clients_names_the_versions_that_are_tried() -> None:
    page = (ROOT / "docs" / "serving.md").read_text()
    versions = [*json.loads((PINS / "node" / "package.json").read_text())["dependencies"].values()]
    for asked_for in PINS.glob("*/requirements.in"):
        pins = dict(re.findall(r"^([\w-]+)==(\S+)", asked_for.with_suffix(".txt").read_text(), re.MULTILINE))
        versions += [pins[name] for name in asked_for.read_text().split()]
    assert len(versions) == 6
    assert not [version for version in versions if f"| {version} |" not in page]


def test_requests_of_one_connection_are_told_apart_by_their_lengths() -> None:
    one, two = b"POST / HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
    assert list(requests_in(one + two + one)) == [one, two, one]


def test_ports_and_ids_of_calls_are_recorded_alike_each_time() -> None:
    def sent(port: int, call: str) -> bytes:
        body = b'{"id": "%s", "tool_call_id": "%s", "name": "f"}'.replace(b"%s", call.encode())
        return b"POST / HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Length: %d\r\n\r\n%b" % (
            port,
            len(body),
            body,
        )

    assert scrubbed(sent(40123, "call_a9f3")) == scrubbed(sent(7, "b")) == sent(8000, "call_1")
