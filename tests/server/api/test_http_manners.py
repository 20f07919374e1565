"""HTTP as clients and proxies speak it: HEAD, slashes, codings."""

from __future__ import annotations

import gzip
from typing import Any

import pytest

from tests.server.helpers.live_server import MAX_MODEL_LEN, LiveServer, error_of


@pytest.mark.parametrize(
    "path", ["/v1/models", "/health", "/variants/plain", "/v1/models/plain", "/openapi.json", "/docs"]
)
def test_a_head_has_what_the_reply_would_have_and_no_body(server: LiveServer, path: str) -> None:
    asked, got = server.client.head(path), server.client.get(path)
    assert (asked.status_code, asked.content) == (got.status_code, b"")
    for name in ("content-type", "content-length"):
        assert asked.headers[name] == got.headers[name]


def test_a_head_of_an_artifact_tells_its_size_and_digest(server: LiveServer) -> None:
    asked, got = (server.client.request(method, "/variants/plain/artifact") for method in ("HEAD", "GET"))
    assert (asked.status_code, asked.content) == (200, b"")
    assert asked.headers["content-length"] == str(len(got.content))
    assert asked.headers["etag"] == got.headers["etag"]
    # The connection serves on.
    assert server.client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("path", "status"), [("/nowhere", 404), ("/v1/completions", 405), ("/v1/models/absent", 404)]
)
def test_a_head_of_no_page_is_none(server: LiveServer, path: str, status: int) -> None:
    asked = server.client.head(path)
    assert (asked.status_code, asked.content) == (status, b"")


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/variants/plain", "/generate"])
def test_a_slash_too_many_redirects(server: LiveServer, path: str) -> None:
    moved = server.client.post(f"{path}//?a=%2Fb", json={})
    assert (moved.status_code, moved.headers["location"], moved.content) == (307, f"{path}?a=%2Fb", b"")


@pytest.mark.parametrize("path", ["//", "//evil.example/", "/nowhere/", "///v1/models/"])
def test_a_slash_behind_no_call_redirects_nowhere(server: LiveServer, path: str) -> None:
    reply = server.client.get(str(server.client.base_url).rstrip("/") + path)
    assert (reply.status_code, "location" in reply.headers) == (404, False)


def test_a_body_with_a_slash_too_many_arrives(server: LiveServer) -> None:
    body = {"model": "plain", "prompt": "hello", "max_tokens": 1}
    reply = server.client.post("/v1/completions/", json=body, follow_redirects=True)
    assert reply.status_code == 200


@pytest.mark.parametrize("coding", ["gzip", "br", "GZIP, identity"])
@pytest.mark.parametrize("route", ["/v1/completions", "/generate", "/tokenize", "/variants?name=a"])
def test_a_compressed_body_is_refused(server: LiveServer, route: str, coding: str) -> None:
    content = gzip.compress(b'{"model": "plain", "prompt": "hello"}')
    headers = {"Content-Encoding": coding, "Content-Type": "application/json"}
    reply = server.client.post(route, content=content, headers=headers)
    assert (reply.status_code, error_of(reply)["code"]) == (415, "unsupported_media_type")


LONG = "a " * MAX_MODEL_LEN


@pytest.mark.parametrize(
    ("route", "body", "beginning"),
    [
        ("/v1/completions", {"prompt": LONG}, "the prompt has"),
        ("/v1/completions", {"prompt": [1] * (MAX_MODEL_LEN + 1)}, "the prompt has"),
        ("/v1/completions", {"prompt": "hi", "max_tokens": MAX_MODEL_LEN}, "2 prompt tokens and"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "the messages have"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 10**6}, ""),
        ("/generate?variant=chatty", {"prompt": LONG}, "the prompt has"),
        ("/tokenize", {"prompt": LONG}, "the prompt has"),
        ("/detokenize", {"tokens": [1] * (MAX_MODEL_LEN + 1)}, "the tokens have"),
    ],
)
def test_what_is_too_long_has_the_code_and_words_that_clients_look_for(
    server: LiveServer, route: str, body: dict[str, Any], beginning: str
) -> None:
    reply = server.client.post(route, json=body if "generate" in route else {"model": "chatty", **body})
    error = error_of(reply)
    assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
    # LiteLLM and LangChain look for these words, too.
    assert error["message"].startswith(f"prompt is too long: {beginning}")
