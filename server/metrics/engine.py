"""Metrics that the engine counts: loads, residency, requests, variants, tenants' tokens, steps and device memory."""

from __future__ import annotations

from collections.abc import Iterable

from server.metrics.instruments import BATCH_BUCKETS
from server.metrics.labels import (
    BASE,
    COLD_LOOKUPS,
    EVICTION_REASONS,
    KINDS,
    LEVELS,
    LOAD_FAILURES,
    LOOKUPS,
    MEMORY_KINDS,
    SOURCES,
    STAGES,
    WAIT_REASONS,
)
from server.metrics.requests import RequestMetrics
from server.metrics.vllm_names import VllmMetrics


class EngineMetrics(RequestMetrics):
    """Metrics of the engine. Thread-safe."""

    def __init__(self, *, process: bool = False) -> None:
        super().__init__(process=process)
        self._define_loading()
        self._define_residency()
        self._define_requests()
        self._define_tokens()
        self._define_steps()
        self.vllm = VllmMetrics(self)

    def forget_variants(self, labels: Iterable[str]) -> None:
        """Remove the series of deleted variants, so that other variants can have a label. Takes 40 µs per label."""
        labels = tuple(labels)
        super().forget_variants(labels)
        for label in labels:
            for kind in KINDS:
                self.variant_tokens_total.remove(label, kind)
            for level in LEVELS:
                self.variant_resident.remove(label, level)

    def _define_loading(self) -> None:
        self.variant_load_seconds = self.labelled_histogram(
            "variant_load_seconds",
            "Time to bring a delta into its slot, by stage",
            source=SOURCES,
            stage=STAGES,
        )
        self.variant_load_bytes_total = self.labelled_counter(
            "variant_load_bytes", "Bytes of loaded deltas", source=SOURCES
        )
        self.variant_load_failures_total = self.labelled_counter(
            "variant_load_failures", "Deltas that failed to load", reason=LOAD_FAILURES
        )
        self.cold_start_seconds = self.labelled_histogram(
            "cold_start_seconds",
            "From admission of a request whose variant was not resident to its first token",
            source=COLD_LOOKUPS,
        )
        self.variant_lookups_total = self.labelled_counter(
            "variant_lookups", "Requests by the level of their delta at admission", result=LOOKUPS
        )

    def _define_residency(self) -> None:
        self.slots = self.gauge("slots", "Slots for deltas in device memory")
        self.slots_in_use = self.gauge("slots_in_use", "Slots that hold a delta or are being filled")
        self.slots_pinned = self.gauge("slots_pinned", "Slots whose delta is never evicted")
        self.variants_resident = self.labelled_gauge(
            "variants_resident", "Deltas in memory, by level", level=LEVELS
        )
        self.variant_resident = self.labelled_gauge(
            "variant_resident", "1 while the variant is in memory", variant=(), level=()
        )
        self.variant_evictions_total = self.labelled_counter(
            "variant_evictions", "Deltas evicted from memory", level=LEVELS, reason=EVICTION_REASONS
        )
        self.host_cache_bytes = self.gauge("host_cache_bytes", "Host memory used by the host cache")
        self.host_cache_limit_bytes = self.gauge("host_cache_limit_bytes", "Size limit of the host cache")
        self.device_memory_bytes = self.labelled_gauge(
            "device_memory_bytes", "Device memory by use", kind=MEMORY_KINDS
        )

    def _define_requests(self) -> None:
        self.num_requests_running = self.gauge("num_requests_running", "Requests that run")
        self.num_requests_waiting = self.gauge("num_requests_waiting", "Admitted requests that wait")
        self.num_requests_waiting_by_reason = self.labelled_gauge(
            "num_requests_waiting_by_reason", "Admitted requests that wait, by reason", reason=WAIT_REASONS
        )
        self.request_queue_seconds = self.histogram(
            "request_queue_seconds", "From admission to the first step"
        )
        self.time_to_first_token_seconds = self.histogram(
            "time_to_first_token_seconds", "From admission to the first token"
        )
        self.inter_token_latency_seconds = self.histogram(
            "inter_token_latency_seconds", "Between two tokens of a request"
        )

    def _define_tokens(self) -> None:
        self.prompt_tokens_total = self.counter("prompt_tokens", "Prompt tokens processed")
        self.generation_tokens_total = self.counter("generation_tokens", "Tokens generated")
        self.variant_tokens_total = self.labelled_counter(
            "variant_tokens", "Tokens processed and generated", variant=(BASE,), kind=KINDS
        )
        self.tenant_tokens_total = self.labelled_counter(
            "tenant_tokens", "Tokens processed and generated", tenant=(), kind=()
        )

    def _define_steps(self) -> None:
        self.step_seconds = self.histogram("step_seconds", "Time of one step of the engine")
        self.batch_requests = self.histogram("batch_requests", "Requests in a step", BATCH_BUCKETS)
        self.batch_distinct_variants = self.histogram(
            "batch_distinct_variants", "Different deltas in a step, without the base", (0, *BATCH_BUCKETS)
        )
        self.kv_cache_usage_ratio = self.gauge(
            "kv_cache_usage_ratio", "Share of the KV cache's pages that running requests use"
        )
        self.prefix_cache_queries_total = self.counter(
            "prefix_cache_queries", "Tokens looked up in the prefix cache"
        )
        self.prefix_cache_hits_total = self.counter("prefix_cache_hits", "Tokens found in the prefix cache")
        self.preemptions_total = self.counter(
            "preemptions", "Sequences whose pages were freed and that are computed again"
        )
