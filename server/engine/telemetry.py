"""Counts what happens to requests and in steps. Knows metrics and their labels; decides nothing."""

from __future__ import annotations

from collections import Counter

from deltastore.errors import PeraxisError
from server.metrics.engine import EngineMetrics
from server.protocol.events import Timings
from server.protocol.messages import Level
from server.protocol.request import Request


class Telemetry:
    """Updates the metrics of requests and steps. `rejected` may be called on any thread, the rest on the engine's.

    Tokens are gathered by tenant and variant, and counted when a step or a request ends: finding the series of a label
    takes microseconds.
    """

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        by_reason = metrics.num_requests_waiting_by_reason
        self._num_loading = by_reason.labels(reason="variant_load")
        self._num_waiting_for_capacity = by_reason.labels(reason="capacity")
        # Tokens that are not counted yet, by kind, the request's tenant, and the variant's tenant and name.
        self._num_tokens: Counter[tuple[str, str, str, str | None]] = Counter()
        # Requests of each variant's name that wait, and those that run.
        self._waiting: Counter[str] = Counter()
        self._running: Counter[str] = Counter()

    def rejected(self, request: Request, error: PeraxisError) -> None:
        """Count a request that was not admitted."""
        self._metrics.rejected(request.tenant, error)

    def delta_lookup(self, request: Request, lookup: Level) -> None:
        """Count where a request's delta was when the engine took it in: device, host or disk."""
        if request.record is not None:
            self._metrics.variant_lookups_total.labels(result=lookup).inc()

    def waits(self, request: Request) -> None:
        """Take note of an admitted request."""
        if request.name is not None:
            self._waiting[request.name] += 1
            self._show_variants()

    def runs(self, request: Request) -> None:
        """Take note that a waiting request has its first step."""
        if request.name is not None:
            _subtract_one(self._waiting, request.name)
            self._running[request.name] += 1
            self._show_variants()

    def ended(self, request: Request, *, has_run: bool) -> None:
        """Take note that a request is over."""
        if request.name is not None:
            _subtract_one(self._running if has_run else self._waiting, request.name)
            self._show_variants()

    def queues(self, num_running: int, num_waiting: int, num_loading: int) -> None:
        """Set the numbers of requests; `num_loading` of the waiting ones wait for their delta."""
        self._metrics.num_requests_running.set(num_running)
        self._metrics.num_requests_waiting.set(num_waiting)
        self._num_loading.set(num_loading)
        self._num_waiting_for_capacity.set(num_waiting - num_loading)

    def cache(self, usage: float, num_queried: int, num_hit: int) -> None:
        """Set the KV cache's used share; count tokens looked up in the prefix cache, and those found."""
        self._metrics.kv_cache_usage_ratio.set(usage)
        self._metrics.prefix_cache_queries_total.inc(num_queried)
        self._metrics.prefix_cache_hits_total.inc(num_hit)

    def preempted(self, num_sequences: int) -> None:
        """Count preempted sequences."""
        self._metrics.preemptions_total.inc(num_sequences)

    def step(self, seconds: float, num_requests: int, num_variants: int) -> None:
        """Record a step and its tokens; the base is none of its variants."""
        self._count_tokens()
        self._metrics.step_seconds.observe(seconds)
        self._metrics.batch_requests.observe(num_requests)
        self._metrics.batch_distinct_variants.observe(num_variants)

    def first_token(self, request: Request, lookup: Level, timings: Timings) -> None:
        """Record a request's first token, its prompt tokens and, if its delta was loaded, its cold start."""
        self.tokens(request, "prompt", len(request.prompt_ids))
        self._metrics.request_queue_seconds.observe(timings.queue_s)
        self._metrics.time_to_first_token_seconds.observe(timings.ttft_s)
        if timings.cold:
            self._metrics.cold_start_seconds.labels(source=lookup).observe(timings.ttft_s)

    def next_token(self, seconds: float) -> None:
        """Record the time between two tokens of a sequence."""
        self._metrics.inter_token_latency_seconds.observe(seconds)

    def tokens(self, request: Request, kind: str, num_tokens: int) -> None:
        """Count tokens of a request; `kind` is ``prompt`` or ``generation``."""
        self._num_tokens[kind, request.tenant, _owner_of(request), request.name] += num_tokens

    def finished(self, request: Request, reason: str, total_s: float) -> None:
        """Record the end of a request and its tokens; `reason` is a FinishReason or ``error``."""
        self._count_tokens()
        self._metrics.finished(_owner_of(request), request.name, reason, total_s)

    def _show_variants(self) -> None:
        self._metrics.vllm.show_requests(self._running, self._waiting)

    def _count_tokens(self) -> None:
        metrics = self._metrics
        for (kind, tenant, owner, name), number in self._num_tokens.items():
            total = metrics.prompt_tokens_total if kind == "prompt" else metrics.generation_tokens_total
            total.inc(number)
            metrics.variant_tokens_total.labels(metrics.variant_label(owner, name), kind).inc(number)
            metrics.tenant_tokens_total.labels(tenant, kind).inc(number)
        self._num_tokens.clear()


def _owner_of(request: Request) -> str:
    """Return the tenant whose variant the request uses, which may be public; the request's own for the base."""
    return request.tenant if request.record is None else request.record.tenant


def _subtract_one(counts: Counter[str], name: str) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]
