"""Requests that are refused, and that end."""

from __future__ import annotations

import pytest

from deltastore.errors import PeraxisError, VariantNotFound
from server.errors import Draining, EngineRestarted, InvalidRequest, QueueFull
from server.metrics.aggregator import Aggregator
from server.metrics.metrics import EngineMetrics, FrontendMetrics, RequestMetrics
from tests.server.metrics.helpers.samples import samples_of


@pytest.mark.parametrize("kind", [EngineMetrics, FrontendMetrics])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (QueueFull(""), "queue_full"),
        (Draining(""), "draining"),
        (EngineRestarted(""), "engine_restarted"),
        (InvalidRequest(""), "invalid"),
        (VariantNotFound(""), "invalid"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_refusal_counts_once_by_its_reason_and_tenant(
    kind: type[RequestMetrics], error: PeraxisError, reason: str
) -> None:
    metrics = kind()
    metrics.rejected("acme", error)
    counted = {
        frozenset(sample.labels.values()): sample.value
        for sample in samples_of(metrics)
        if sample.name.endswith("rejections_total") and sample.value
    }
    assert counted == {frozenset({reason}): 1, frozenset({"acme", reason}): 1}


def test_a_request_that_an_http_process_loses_counts_as_one_of_the_engines() -> None:
    aggregator = Aggregator()
    engine, frontend = EngineMetrics(), FrontendMetrics()
    engine.finished("acme", "v", "stop", 1.0)
    engine.finished("acme", "v", "error", 1.0)
    frontend.finished("acme", "v", "error", 1.0)
    for source in (engine, frontend):
        aggregator.started(source)
        aggregator.received(source, source.snapshot())
    families = {family.name: family for family in aggregator.merged().families}
    counted = {series.labels: series.value for series in families["peraxis_variant_requests"].series}
    assert (counted["acme/v", "stop"], counted["acme/v", "error"]) == (1, 2)
    assert sum(families["peraxis_e2e_request_latency_seconds"].series[0].counts) == 3


def test_an_http_process_forgets_deleted_variants() -> None:
    metrics = FrontendMetrics()
    metrics.finished("acme", "v", "error", 1.0)
    metrics.forget_variants(["acme/v", "acme/unknown"])
    families = {family.name: family for family in metrics.snapshot().families}
    assert {series.labels[0] for series in families["peraxis_variant_requests"].series} == {"base"}
