"""Metrics of refused requests, which the engine and the HTTP processes both count."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from deltastore.errors import PeraxisError
from server.errors import Draining, EngineRestarted, QueueFull
from server.metrics.definitions import MetricSet
from server.metrics.labels import REJECTIONS

# Values of the label `reason`; other errors count as "invalid".
REASONS: dict[type[PeraxisError], str] = {
    QueueFull: "queue_full",
    Draining: "draining",
    EngineRestarted: "engine_restarted",
}


class RejectionMetrics(MetricSet):
    """Metrics of requests that a process refused."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.admission_rejections_total = self._counter(
            "admission_rejections", "Requests that were refused", reason=REJECTIONS
        )
        self.tenant_rejections_total = self._counter(
            "tenant_rejections", "Requests that were refused", tenant=(), reason=()
        )

    def rejected(self, tenant: str, error: PeraxisError) -> None:
        """Count a request that was not admitted. Call it once per request, in the process that refuses it."""
        reason = REASONS.get(type(error), "invalid")
        self.admission_rejections_total.labels(reason=reason).inc()
        self.tenant_rejections_total.labels(tenant=tenant, reason=reason).inc()
