"""The description of vLLM's calls in `/openapi.json` is true of what they answer."""

from __future__ import annotations

from typing import Any

import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from tests.server.api.conftest import LoraServer

SETTINGS = settings(
    max_examples=25, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_no_request_of_schemathesis_fails_the_server_or_gets_an_undocumented_status_or_type(
    lora: LoraServer,
) -> None:
    schema = schemathesis.openapi.from_url(f"{lora.server.url}/openapi.json")
    found = [each.ok() for each in schema.get_all_operations() if isinstance(each, Ok)]
    operations = {each.path: each for each in found if "lora" in each.path}
    assert set(operations) == {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
    for operation in operations.values():
        assert operation.body

        @SETTINGS
        @given(case=operation.as_strategy())
        def test(case: schemathesis.Case[Any]) -> None:
            case.call_and_validate(
                checks=[not_a_server_error, status_code_conformance, content_type_conformance], timeout=240
            )

        test()
