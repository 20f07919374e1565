"""Metrics of requests that end, and the label of variants in them. The engine and the HTTP processes count these."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from deltastore.errors import PeraxisError
from server.errors import Draining, EngineRestarted, QueueFull, RateLimited
from server.metrics.instruments import MetricSet
from server.metrics.labels import BASE, FINISH_REASONS, OTHER, REJECTIONS, VariantLabels, variant_label

# Values of the label `reason`; other errors count as "invalid".
REASONS: dict[type[PeraxisError], str] = {
    QueueFull: "queue_full",
    Draining: "draining",
    EngineRestarted: "engine_restarted",
}


class RequestMetrics(MetricSet):
    """Metrics of requests that a process refused or ended. Thread-safe.

    A request is counted by one process: the one that refuses it, the engine that answers it, or the HTTP process that
    learns that the engine is gone.
    """

    def __init__(self, *, process: bool = False) -> None:
        super().__init__(process=process)
        self._labels = VariantLabels()
        self._lock = threading.Lock()
        self.admission_rejections_total = self.labelled_counter(
            "admission_rejections", "Requests that were refused", reason=REJECTIONS
        )
        self.tenant_rejections_total = self.labelled_counter(
            "tenant_rejections", "Requests that were refused", tenant=(), reason=()
        )
        self.variant_requests_total = self.labelled_counter(
            "variant_requests", "Finished requests", variant=(BASE,), finish_reason=FINISH_REASONS
        )
        self.e2e_request_latency_seconds = self.histogram(
            "e2e_request_latency_seconds", "From admission to the last token"
        )

    def rejected(self, tenant: str, error: PeraxisError) -> None:
        """Count a request of a tenant that was not admitted."""
        reason = error.param if isinstance(error, RateLimited) else REASONS.get(type(error), "invalid")
        self.admission_rejections_total.labels(reason=reason).inc()
        self.tenant_rejections_total.labels(tenant=tenant, reason=reason).inc()

    def finished(self, owner: str, name: str | None, reason: str, total_s: float) -> None:
        """Count the end of an admitted request.

        Args:
            owner: the tenant whose variant it used.
            name: the variant's name; None for the base.
            reason: a value of `FINISH_REASONS`; ``error`` for a request that was lost with its engine.
            total_s: since its admission.
        """
        self.e2e_request_latency_seconds.observe(total_s)
        self.variant_requests_total.labels(self.variant_label(owner, name), reason).inc()

    def variant_label(self, owner: str, name: str | None) -> str:
        """Return the `variant` label of a tenant's variant, or of the base if `name` is None.

        A variant gets a label of its own while its tenant's share of them lasts, until `forget_variants` gives it back.
        """
        if name is None:
            return BASE
        label = variant_label(owner, name)
        with self._lock:
            if not self._labels.take(label):
                return OTHER
            # Every label has a series, so that a snapshot shows which labels are taken.
            self.variant_requests_total.labels(label, "error")
        return label

    def forget_variants(self, labels: Iterable[str]) -> None:
        """Remove the series of deleted variants, so that other variants can have a label. Takes 40 µs per label."""
        for label in labels:
            with self._lock:
                self._labels.give_back(label)
            for reason in FINISH_REASONS:
                self.variant_requests_total.remove(label, reason)
