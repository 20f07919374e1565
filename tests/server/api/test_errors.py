"""Invalid requests over HTTP: each error has the one JSON shape, and the next request works."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.server.helpers.live_server import MAX_MODEL_LEN, Artifacts, LiveServer, error_of

OK = {"prompt": "hello", "max_new_tokens": 1}
DEEP = 100_000


def post(server: LiveServer, body: bytes | str, content_type: str = "application/json") -> Any:
    return server.client.post("/generate", content=body, headers={"Content-Type": content_type})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": None}, None),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, None),
        ({"prompt": None, "messages": []}, "messages"),
        ({"prompt": None, "messages": [{"role": "user"}]}, "messages"),
        ({"prompt": None, "messages": [{"role": "user", "content": "a", "weight": 1}]}, "messages"),
        ({"prompt": "a" * MAX_MODEL_LEN}, "prompt"),
        ({"max_new_tokens": MAX_MODEL_LEN}, "max_new_tokens"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": True}, "max_new_tokens"),
        ({"max_new_tokens": "5"}, "max_new_tokens"),
        ({"max_new_tokens": 10**30}, "max_new_tokens"),
        ({"max_new_tokens": 1.5}, "max_new_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 1e9}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"logprobs": 21}, "logprobs"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"max_tokens": 5}, "max_tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_parameter_out_of_range_is_named(
    server: LiveServer, fields: dict[str, Any], param: str | None
) -> None:
    reply = server.client.post("/generate", json={**OK, **fields})
    error = error_of(reply)
    assert (reply.status_code, error["param"]) == (400, param)
    # What is too long has a code of its own, which `test_http_manners.py` tests.
    assert error["code"] in ("invalid_request", "context_length_exceeded")
    assert error["type"] == "invalid_request_error"


def test_a_field_of_another_api_is_answered_with_the_way_of_this_call(server: LiveServer) -> None:
    reply = server.client.post("/generate", json={**OK, "max_tokens": 5})
    assert error_of(reply)["message"] == "'max_tokens' is not a field of this call: use max_new_tokens"
    reply = server.client.post("/generate", json={**OK, "model": "plain"})
    assert error_of(reply)["message"] == (
        "'model' is not a field of this call: name the variant in the URL, as ?variant=NAME"
    )


def test_stop_may_be_null(server: LiveServer) -> None:
    assert server.client.post("/generate", json={**OK, "stop": None}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"prompt"',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"\\ud800": 1, "prompt": "a"}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}",
        b'{"x": ' * DEEP + b"1" + b"}" * DEEP,
        b'\xef\xbb\xbf\xef\xbb\xbf{"prompt": "a"}',
    ],
    ids=lambda body: str(body[:24]),
)
def test_an_invalid_json_body_is_refused(server: LiveServer, body: bytes) -> None:
    reply = post(server, body)
    assert (reply.status_code, error_of(reply)["code"]) == (400, "invalid_request")
    assert server.generate(max_new_tokens=1).status_code == 200


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "?"]
)
def test_json_of_another_content_type_is_refused(server: LiveServer, content_type: str) -> None:
    reply = post(server, json.dumps(OK), content_type)
    assert (reply.status_code, error_of(reply)["code"]) == (400, "invalid_request")
    assert "application/json" in error_of(reply)["message"]


def test_a_body_that_is_too_large_is_refused(server: LiveServer) -> None:
    reply = post(server, json.dumps({"prompt": "a" * (9 << 20)}))
    assert (reply.status_code, error_of(reply)["code"]) == (413, "too_large")


@pytest.mark.parametrize(
    "variant",
    [
        "absent", "plain@2", "plain@", "plain@0", "plain@01", "plain@one", "plain@1@1", "plain@99999999999", "@1", "",
        " plain", "Plain", "../default/plain", "..", ".", "default/plain", "plain\n", "plain\x00", "base@1", "other",
        "a" * 4000, "plàin", "%2e%2e",
    ],
)  # fmt: skip
def test_an_unknown_variant_is_not_found(server: LiveServer, variant: str) -> None:
    reply = server.generate(variant)
    assert (reply.status_code, error_of(reply)["code"]) == (404, "model_not_found")


def test_a_variant_whose_name_is_no_text_is_not_found(server: LiveServer) -> None:
    reply = server.client.post("/generate?variant=%ff", json=OK)
    assert (reply.status_code, error_of(reply)["code"]) == (404, "model_not_found")


def test_a_misspelt_query_parameter_is_refused(server: LiveServer) -> None:
    reply = server.client.post("/generate?varaint=plain", json=OK)
    assert (reply.status_code, error_of(reply)["param"]) == (400, "varaint")


def test_an_unknown_path_is_not_found(server: LiveServer) -> None:
    for path in ("/nothing", "/nothing/", "/variants/a/b", "/redoc"):
        reply = server.client.get(path)
        assert (reply.status_code, error_of(reply)["code"]) == (404, "not_found")


def test_an_unsupported_method_is_refused_with_the_supported_ones(server: LiveServer) -> None:
    reply = server.client.get("/generate")
    assert (reply.status_code, error_of(reply)["code"]) == (405, "method_not_allowed")
    assert reply.headers["Allow"] == "POST"


def test_a_valid_request_id_is_kept(server: LiveServer) -> None:
    reply = server.client.get("/health", headers={"X-Request-Id": "job-17:a/b"})
    assert reply.headers["X-Request-Id"] == "job-17:a/b"


@pytest.mark.parametrize("given", [None, b"", b"a b", b"x" * 129, "é".encode()])
def test_any_other_request_gets_a_generated_id(server: LiveServer, given: bytes | None) -> None:
    headers: list[tuple[bytes, bytes]] = [] if given is None else [(b"X-Request-Id", given)]
    ids = {server.client.get("/nothing", headers=headers).headers["X-Request-Id"] for _ in range(2)}
    assert len(ids) == 2
    assert all(re.fullmatch(r"req-[0-9a-f]{24}", request_id) for request_id in ids)


def test_two_requests_with_one_id_are_both_answered(server: LiveServer) -> None:
    headers = {"X-Request-Id": "the-same"}
    with server.streaming("third", max_new_tokens=500) as stream:
        next(stream)
        with server.client.stream("POST", "/generate", json={**OK, "stream": True}, headers=headers) as reply:
            assert reply.headers["X-Request-Id"] == "the-same"
            reply.read()
        assert next(stream)[0] == "token"


def test_details_of_a_server_failure_are_not_shown_to_clients(
    server: LiveServer, artifacts: Artifacts
) -> None:
    assert server.upload("broken", artifacts.third).status_code == 201
    record = server.registry / "variants" / "default" / "broken" / "1.json"
    record.write_text("{")
    reply = server.generate("broken")
    error = error_of(reply)
    assert (reply.status_code, error["code"], error["type"]) == (500, "internal_error", "server_error")
    assert str(server.registry) not in error["message"]
    assert reply.headers["X-Request-Id"] in error["message"]
    assert str(record) in server.log.read_text()
    # Deleting the variant repairs the damaged record.
    assert server.client.delete("/variants/broken").status_code == 200
    assert server.generate("broken").status_code == 404
