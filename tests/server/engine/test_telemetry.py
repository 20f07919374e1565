"""Tokens are counted when a step or a request ends; variants with requests are shown under vLLM's metric."""

from __future__ import annotations

import pytest

from deltastore.registry.records import VersionRecord
from server.metrics.metrics import EngineMetrics, Telemetry
from server.protocol.request import Request, token_ids_of
from tests.server.metrics.helpers.samples import samples_of, value_of

RECORD = VersionRecord(
    tenant="owner",
    name="v",
    version=1,
    digest="a" * 64,
    size_bytes=1,
    data_start=0,
    device_bytes=1,
    base_fingerprint="b" * 64,
    method="both",
    report="0" * 32,
    chunk_sha256=("c" * 64,),
    created_at="2026-01-01T00:00:00+00:00",
    activate=True,
)
ON_BASE = Request("1", "guest", None, None, token_ids_of([1, 2, 3]), 4)
ON_VARIANT = Request("2", "guest", "v", RECORD, token_ids_of([1, 2, 3]), 4)


@pytest.fixture
def metrics() -> EngineMetrics:
    return EngineMetrics()


@pytest.fixture
def telemetry(metrics: EngineMetrics) -> Telemetry:
    return Telemetry(metrics)


def counts(metrics: EngineMetrics) -> list[float | None]:
    """Return the generated tokens: all, the base's, the variant's, and the tenant's."""
    kind = {"kind": "generation"}
    return [
        value_of(metrics, "peraxis_generation_tokens_total"),
        value_of(metrics, "peraxis_variant_tokens_total", {"variant": "base", **kind}),
        value_of(metrics, "peraxis_variant_tokens_total", {"variant": "owner/v", **kind}),
        value_of(metrics, "peraxis_tenant_tokens_total", {"tenant": "guest", **kind}),
    ]


def test_a_step_counts_its_tokens_once_by_variant_and_tenant(
    telemetry: Telemetry, metrics: EngineMetrics
) -> None:
    for request in (ON_BASE, ON_VARIANT, ON_VARIANT):
        telemetry.tokens(request, "generation", 1)
    for _ in range(2):
        telemetry.step(0.01, num_requests=2, num_variants=1)
        assert counts(metrics) == [3, 1, 2, 3]


def test_tokens_are_counted_before_their_request_is_answered(
    telemetry: Telemetry, metrics: EngineMetrics
) -> None:
    telemetry.tokens(ON_VARIANT, "generation", 2)
    telemetry.finished(ON_VARIANT, "stop", 0.1)
    assert counts(metrics) == [2, 0, 2, 2]
    label = {"variant": "owner/v", "finish_reason": "stop"}
    assert value_of(metrics, "peraxis_variant_requests_total", label) == 1


def adapters_with_requests(metrics: EngineMetrics) -> list[tuple[str, str]]:
    """Return the labels of running and of waiting adapters, a pair per series."""
    return [
        (sample.labels["running_lora_adapters"], sample.labels["waiting_lora_adapters"])
        for sample in samples_of(metrics)
        if sample.name == "vllm:lora_requests_info"
    ]


def test_a_variant_is_shown_as_waiting_then_running_until_its_last_request_ends(
    telemetry: Telemetry, metrics: EngineMetrics
) -> None:
    for _ in range(2):
        telemetry.waits(ON_VARIANT)
    assert adapters_with_requests(metrics) == [("", "v")]
    telemetry.runs(ON_VARIANT)
    assert adapters_with_requests(metrics) == [("v", "v")]
    telemetry.ended(ON_VARIANT, has_run=False)
    assert adapters_with_requests(metrics) == [("v", "")]
    telemetry.ended(ON_VARIANT, has_run=True)
    assert adapters_with_requests(metrics) == [("", "")]


def test_the_base_is_no_adapter(telemetry: Telemetry, metrics: EngineMetrics) -> None:
    telemetry.waits(ON_BASE)
    telemetry.runs(ON_BASE)
    telemetry.ended(ON_BASE, has_run=True)
    assert adapters_with_requests(metrics) == []
