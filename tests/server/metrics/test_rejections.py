"""Reasons of refused requests."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from deltastore.errors import PeraxisError, VariantNotFound
from server.errors import Draining, EngineRestarted, InvalidRequest, QueueFull
from server.metrics.engine import EngineMetrics
from server.metrics.frontend import FrontendMetrics
from server.metrics.rejections import RejectionMetrics


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
    kind: type[RejectionMetrics], error: PeraxisError, reason: str
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
