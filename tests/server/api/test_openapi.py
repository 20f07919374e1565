"""`/openapi.json`: complete, and true of what the server answers to requests that schemathesis makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from server.api.access import ROLES
from server.api.openapi import EXAMPLES, OPERATIONS, SCHEMAS, TAGS
from tests.server.api.helpers.described import check_described
from tests.server.api.helpers.described import document as described
from tests.server.helpers.live_server import WAIT_S, Artifacts, LiveServer, live_server

# Of each operation.
SETTINGS = settings(
    max_examples=25,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def server(artifacts: Artifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    registry = tmp_path_factory.mktemp("openapi") / "registry"
    with live_server(artifacts.base, registry, "--source-dir", artifacts.plain.parent) as server:
        for name, artifact in (("plain", artifacts.plain), ("chatty", artifacts.chatty)):
            assert server.upload(name, artifact).status_code == 201
        yield server


@pytest.fixture(scope="module")
def document(server: LiveServer) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{server.url}/openapi.json", timeout=WAIT_S).json()
    return found


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "$ref":
                yield value
            yield from references(value)
    elif isinstance(node, list):
        for each in node:
            yield from references(each)


def test_every_reference_names_a_schema(document: dict[str, Any]) -> None:
    named = {name.removeprefix(SCHEMAS) for name in references(document)}
    assert named == set(document["components"]["schemas"])


def kind_of(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, reply.headers["content-type"].partition(";")[0]


# In the tests below, the client's hook holds each reply against the description.


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"prompt": "a"}),
        ("/v1/completions", {"model": "base", "prompt": "a"}),
        ("/v1/chat/completions", {"model": "chatty", "messages": [{"role": "user", "content": "a"}]}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_generated_tokens_are_described_whole_and_as_events(
    server: LiveServer, path: str, body: dict[str, Any], stream: bool
) -> None:
    reply = server.client.post(path, json={**body, "stream": stream})
    assert kind_of(reply) == (200, "text/event-stream" if stream else "application/json")


@pytest.mark.parametrize(
    ("selected", "kind"),
    [
        ("bytes=0-3", (206, "application/octet-stream")),
        ("bytes=0-3,9-11", (200, "application/octet-stream")),
        ("bytes=999999999-", (416, "application/json")),
    ],
)
def test_ranges_of_a_download_are_described(server: LiveServer, selected: str, kind: tuple[int, str]) -> None:
    assert kind_of(server.client.get("/variants/plain/artifact", headers={"Range": selected})) == kind


def test_a_publication_from_a_source_is_described(server: LiveServer, artifacts: Artifacts) -> None:
    reply = server.client.post("/variants?name=sourced", json={"source": str(artifacts.third)})
    assert kind_of(reply) == (201, "application/json")


@pytest.mark.parametrize(
    ("status", "headers", "what"),
    [
        (418, {"Content-Type": "application/json"}, "answers 418"),
        (200, {"Content-Type": "text/xml"}, "with 'text/xml'"),
    ],
)
def test_a_reply_that_is_not_described_is_found(status: int, headers: dict[str, str], what: str) -> None:
    request = httpx.Request("POST", "http://test/variants?name=a")
    with pytest.raises(AssertionError, match=what):
        check_described(httpx.Response(status, headers=headers, request=request))


@pytest.mark.parametrize("call", EXAMPLES, ids=" ".join)
def test_the_example_of_each_body_is_valid(call: tuple[str, str]) -> None:
    operation = described()["paths"][call[1]][call[0].lower()]
    body = operation["requestBody"]["content"]["application/json"]
    schema = {**body["schema"], "components": described()["components"]}
    assert jsonschema_rs.validator_for(schema).is_valid(body["example"])


def test_with_keys_each_call_names_the_key_unless_it_needs_none() -> None:
    for path, operations in described()["paths"].items():
        for method, operation in operations.items():
            needs_key = ROLES[method.upper(), path] is not None
            assert operation.get("security") == ([{"key": []}] if needs_key else None)


def test_every_call_has_a_group_and_a_summary() -> None:
    operations = [operation for path in described()["paths"].values() for operation in path.values()]
    assert {tag for operation in operations for tag in operation["tags"]} == {*TAGS.values(), OPERATIONS}
    assert not [operation for operation in operations if not operation["summary"]]
    assert (
        described()["paths"]["/me"]["get"]["summary"]
        == "Show the caller's tenant, roles, key, limits and usage"
    )


def test_no_request_of_schemathesis_fails_the_server_or_gets_a_status_or_type_that_is_not_documented(
    server: LiveServer,
) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    for found in schema.get_all_operations():
        assert isinstance(found, Ok)
        operation = found.ok()

        @SETTINGS
        @given(case=operation.as_strategy())
        def test(case: schemathesis.Case[Any]) -> None:
            case.call_and_validate(
                checks=[not_a_server_error, status_code_conformance, content_type_conformance], timeout=240
            )

        test()
