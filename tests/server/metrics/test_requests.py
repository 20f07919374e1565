"""Requests that are refused, and that end."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from deltastore.errors import PeraxisError, VariantNotFound
from server.errors import Draining, EngineRestarted, InvalidRequest, QueueFull
from server.metrics.aggregator import Aggregator
from server.metrics.engine import EngineMetrics
from server.metrics.frontend import FrontendMetrics
from server.metrics.requests import RequestMetrics
from server.metrics.snapshot import take_snapshot


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
    registry = CollectorRegistry()
    kind(registry).rejected("acme", error)
    counted = {
        tuple(sample.labels.values()): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name.endswith("rejections_total") and sample.value
    }
    assert counted == {(reason,): 1, ("acme", reason): 1}


def test_a_request_that_an_http_process_loses_counts_as_one_of_the_engines() -> None:
    aggregator = Aggregator()
    engine, frontend = EngineMetrics(CollectorRegistry()), FrontendMetrics(CollectorRegistry())
    engine.finished("acme", "v", "stop", 1.0)
    engine.finished("acme", "v", "error", 1.0)
    frontend.finished("acme", "v", "error", 1.0)
    for source in (engine, frontend):
        aggregator.started(source)
        aggregator.received(source, take_snapshot(source.registry))
    families = {family.name: family for family in aggregator.merged().families}
    counted = {series.labels: series.value for series in families["peraxis_variant_requests"].series}
    assert (counted["acme/v", "stop"], counted["acme/v", "error"]) == (1, 2)
    assert sum(families["peraxis_e2e_request_latency_seconds"].series[0].counts) == 3


def test_an_http_process_forgets_deleted_variants() -> None:
    metrics = FrontendMetrics(CollectorRegistry())
    metrics.finished("acme", "v", "error", 1.0)
    metrics.forget_variants(["acme/v", "acme/unknown"])
    families = {family.name: family for family in take_snapshot(metrics.registry).families}
    assert {series.labels[0] for series in families["peraxis_variant_requests"].series} == {"base"}
