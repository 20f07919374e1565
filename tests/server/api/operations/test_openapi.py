"""`/openapi.json`: complete, and true of what the server answers to requests that schemathesis makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import status_code_conformance

from server.api.operations.openapi import SCHEMAS
from tests.server.helpers.live_server import Artifacts, LiveServer, live_server

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
    with live_server(artifacts.base, tmp_path_factory.mktemp("openapi") / "registry") as server:
        assert server.upload("plain", artifacts.plain).status_code == 201
        yield server


@pytest.fixture(scope="module")
def document(server: LiveServer) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{server.url}/openapi.json").json()
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


def test_a_reply_is_described_as_an_object_unless_it_is_text_or_a_file(document: dict[str, Any]) -> None:
    contents = {
        (method, path, status): reply["content"]
        for path, calls in document["paths"].items()
        for method, call in calls.items()
        for status, reply in call["responses"].items()
        if status.startswith("2")
    }
    others = {call: content for call, content in contents.items() if "application/json" not in content}
    assert {call[:2]: [*content] for call, content in others.items()} == {
        ("get", "/metrics"): ["text/plain"],
        ("get", "/docs"): ["text/html"],
        ("get", "/docs/{asset}"): ["text/javascript", "text/css"],
        ("get", "/variants/{name}/artifact"): ["application/octet-stream"],
    }
    for call in contents.keys() - others.keys():
        assert contents[call] == {"application/json": {"schema": {"type": "object"}}}


def test_no_request_of_schemathesis_fails_the_server_or_gets_a_status_that_is_not_documented(
    server: LiveServer,
) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    for found in schema.get_all_operations():
        assert isinstance(found, Ok)
        operation = found.ok()

        @SETTINGS
        @given(case=operation.as_strategy())
        def test(case: schemathesis.Case[Any]) -> None:
            case.call_and_validate(checks=[not_a_server_error, status_code_conformance], timeout=60)

        test()
