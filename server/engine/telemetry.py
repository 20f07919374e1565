"""What the engine tells the world: translates its events into metrics. Decides nothing."""

from __future__ import annotations

from deltastore.errors import PeraxisError
from server.engine.events import Timings
from server.engine.request import Request
from server.errors import Draining, LoadTimeout, QueueFull
from server.metrics import Metrics

REASONS: dict[type[PeraxisError], str] = {
    LoadTimeout: "load_timeout",
    QueueFull: "queue_full",
    Draining: "draining",
}


class Telemetry:
    """What happens to requests and in steps."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics

    def rejected(self, error: PeraxisError) -> None:
        self.metrics.admission_rejections_total.labels(reason=REASONS.get(type(error), "invalid")).inc()

    def admitted(self, request: Request, found: str) -> None:
        """`found` says where its delta was: device, host or disk."""
        if request.record is not None:
            self.metrics.variant_lookups_total.labels(result=found).inc()

    def queues(self, num_running: int, num_waiting: int, num_loading: int) -> None:
        """Requests; `num_loading` of those that wait do so for their delta, the others for their turn."""
        self.metrics.num_requests_running.set(num_running)
        self.metrics.num_requests_waiting.set(num_waiting)
        by_reason = self.metrics.num_requests_waiting_by_reason
        by_reason.labels(reason="variant_load").set(num_loading)
        by_reason.labels(reason="capacity").set(num_waiting - num_loading)

    def cache(self, usage: float, num_queried: int, num_hit: int) -> None:
        """The key-value cache's used share, and tokens that were looked for among known prefixes and found."""
        self.metrics.kv_cache_usage_ratio.set(usage)
        self.metrics.prefix_cache_queries_total.inc(num_queried)
        self.metrics.prefix_cache_hits_total.inc(num_hit)

    def preempted(self, count: int) -> None:
        self.metrics.preemptions_total.inc(count)

    def step(self, seconds: float, num_requests: int, num_variants: int) -> None:
        self.metrics.step_seconds.observe(seconds)
        self.metrics.batch_requests.observe(num_requests)
        self.metrics.batch_distinct_variants.observe(num_variants)

    def first_token(self, request: Request, found: str, timings: Timings) -> None:
        self.tokens(request, "prompt", len(request.prompt_ids))
        self.metrics.request_queue_seconds.observe(timings.queue_s)
        self.metrics.time_to_first_token_seconds.observe(timings.ttft_s)
        if timings.cold:
            self.metrics.cold_start_seconds.labels(source=found).observe(timings.ttft_s)

    def next_token(self, seconds: float) -> None:
        self.metrics.inter_token_latency_seconds.observe(seconds)

    def tokens(self, request: Request, kind: str, count: int) -> None:
        """Prompt tokens once their request has its first token, generated ones as they come."""
        total = self.metrics.prompt_tokens_total if kind == "prompt" else self.metrics.generation_tokens_total
        total.inc(count)
        self.metrics.variant_tokens_total.labels(variant=self._variant_of(request), kind=kind).inc(count)
        self.metrics.tenant_tokens_total.labels(tenant=request.tenant, kind=kind).inc(count)

    def finished(self, request: Request, reason: str, total_s: float) -> None:
        self.metrics.e2e_request_latency_seconds.observe(total_s)
        requests = self.metrics.variant_requests_total
        requests.labels(variant=self._variant_of(request), finish_reason=reason).inc()

    def _variant_of(self, request: Request) -> str:
        tenant = request.tenant if request.record is None else request.record.tenant
        return self.metrics.variant_label(tenant, request.name)
