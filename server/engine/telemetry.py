"""What the engine tells the world: translates its events into metrics. Decides nothing."""

from __future__ import annotations

from collections.abc import Sequence

from deltastore.errors import ArtifactError, PeraxisError, VariantNotFound, VariantQuarantined
from deltastore.loader import LoadReport
from deltastore.records import VersionRecord
from server.engine.request import Request, Timings
from server.errors import Draining, LoadTimeout, QueueFull
from server.metrics import Metrics

REASONS: dict[type[PeraxisError], str] = {
    VariantQuarantined: "corrupt",
    VariantNotFound: "missing",
    ArtifactError: "corrupt",
    LoadTimeout: "load_timeout",
    QueueFull: "queue_full",
    Draining: "draining",
}


class Telemetry:
    """Residency's observer and the engine's own."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics

    def loaded(self, record: VersionRecord, report: LoadReport) -> None:
        stages = {"read": report.read_s, "copy": report.copy_s, "total": report.total_s}
        for stage, seconds in stages.items():
            self.metrics.variant_load_seconds.labels(source=report.source, stage=stage).observe(seconds)
        self.metrics.variant_load_bytes_total.labels(source=report.source).inc(report.device_bytes)
        self.metrics.variant_resident.labels(variant=self._variant(record), level="gpu").set(1)

    def load_failed(self, record: VersionRecord, error: PeraxisError) -> None:
        self.metrics.variant_load_failures_total.labels(reason=REASONS.get(type(error), "error")).inc()

    def evicted(self, record: VersionRecord, reason: str) -> None:
        self.metrics.variant_evictions_total.labels(level="gpu", reason=reason).inc()
        self.metrics.variant_resident.labels(variant=self._variant(record), level="gpu").set(0)

    def occupancy(self, num_used: int, num_pinned: int, num_resident: int) -> None:
        self.metrics.slots_in_use.set(num_used)
        self.metrics.slots_pinned.set(num_pinned)
        self.metrics.variants_resident.labels(level="gpu").set(num_resident)

    def rejected(self, error: PeraxisError) -> None:
        self.metrics.admission_rejections_total.labels(reason=REASONS.get(type(error), "invalid")).inc()

    def admitted(self, request: Request, resident: bool) -> None:
        if request.record is not None:
            self.metrics.variant_lookups_total.labels(result="gpu" if resident else "disk").inc()

    def queues(self, num_running: int, waiting: Sequence[bool]) -> None:
        """`waiting` says of each waiting request whether it waits for its delta (else for its turn)."""
        self.metrics.num_requests_running.set(num_running)
        self.metrics.num_requests_waiting.set(len(waiting))
        by_reason = self.metrics.num_requests_waiting_by_reason
        by_reason.labels(reason="variant_load").set(sum(waiting))
        by_reason.labels(reason="capacity").set(len(waiting) - sum(waiting))

    def step(self, seconds: float, num_variants: int) -> None:
        self.metrics.step_seconds.observe(seconds)
        self.metrics.batch_requests.observe(1)
        self.metrics.batch_distinct_variants.observe(num_variants)

    def first_token(self, request: Request, timings: Timings) -> None:
        self.metrics.request_queue_seconds.observe(timings.queue_s)
        self.metrics.time_to_first_token_seconds.observe(timings.ttft_s)
        if timings.cold:
            self.metrics.cold_start_seconds.labels(source="disk").observe(timings.ttft_s)

    def next_token(self, seconds: float) -> None:
        self.metrics.inter_token_latency_seconds.observe(seconds)

    def finished(self, request: Request, reason: str, total_s: float, num_generated: int) -> None:
        variant = self.metrics.variant_label(
            request.tenant if request.record is None else request.record.tenant, request.name
        )
        num_prompt = len(request.prompt_ids) if num_generated else 0
        self.metrics.e2e_request_latency_seconds.observe(total_s)
        self.metrics.variant_requests_total.labels(variant=variant, finish_reason=reason).inc()
        for kind, count, total in (
            ("prompt", num_prompt, self.metrics.prompt_tokens_total),
            ("generation", num_generated, self.metrics.generation_tokens_total),
        ):
            total.inc(count)
            self.metrics.variant_tokens_total.labels(variant=variant, kind=kind).inc(count)
            self.metrics.tenant_tokens_total.labels(tenant=request.tenant, kind=kind).inc(count)

    def _variant(self, record: VersionRecord) -> str:
        return self.metrics.variant_label(record.tenant, record.name)
