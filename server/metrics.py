"""Every metric of the service and its labels. Callers decide what they count.

An attribute has its metric's name without `peraxis_`. Series whose labels are known in advance start at 0, so that a
rate includes the first event.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

PREFIX = "peraxis_"
MAX_VARIANT_LABELS = 200
BASE, OTHER = "base", "other"

LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120,
)  # fmt: skip
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

SOURCES = ("disk", "host")
STAGES = ("read", "copy", "total")
LEVELS = ("device", "host")
LOOKUPS = ("device", "host", "disk")
KINDS = ("prompt", "generation")
WAIT_REASONS = ("capacity", "variant_load")
FINISH_REASONS = ("stop", "length", "cancelled", "error")
LOAD_FAILURES = ("corrupt", "missing", "error")
EVICTION_REASONS = ("capacity", "unload")
REJECTIONS = ("queue_full", "draining", "invalid")
MEMORY_KINDS = ("base", "slots", "kv", "other")
UPLOAD_RESULTS = ("created", "duplicate", "rejected", "failed")

M = TypeVar("M", Counter, Gauge, Histogram)


class Metrics:
    """The service's metrics in one prometheus_client registry. Thread-safe."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._labels: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        ProcessCollector(registry=registry)
        self._define_loading()
        self._define_residency()
        self._define_requests()
        self._define_variants_and_tenants()
        self._define_engine()
        self._define_registry_and_process()

    def variant_label(self, tenant: str, name: str | None) -> str:
        """Return the `variant` label of a variant, or of the base if `name` is None."""
        if name is None:
            return BASE
        with self._lock:
            if (tenant, name) not in self._labels:
                if len(self._labels) >= MAX_VARIANT_LABELS:
                    return OTHER
                self._labels.add((tenant, name))
        return f"{tenant}/{name}"

    def variant_labels(self) -> frozenset[tuple[str, str]]:
        """Return tenant and name of every variant that has a label of its own."""
        with self._lock:
            return frozenset(self._labels)

    def forget_variant(self, tenant: str, name: str) -> None:
        """Remove the series of a deleted variant, so that another variant can have a label."""
        with self._lock:
            self._labels.discard((tenant, name))
        for metric in self._per_variant:
            metric.remove_by_labels({"variant": f"{tenant}/{name}"})

    def _define_loading(self) -> None:
        self.variant_load_seconds = self._histogram(
            "variant_load_seconds",
            "Time to bring a delta into its slot, by stage",
            source=SOURCES,
            stage=STAGES,
        )
        self.variant_load_bytes_total = self._counter(
            "variant_load_bytes", "Bytes of loaded deltas", source=SOURCES
        )
        self.variant_load_failures_total = self._counter(
            "variant_load_failures", "Deltas that failed to load", reason=LOAD_FAILURES
        )
        self.cold_start_seconds = self._histogram(
            "cold_start_seconds",
            "From admission of a request whose variant was not resident to its first token",
            source=SOURCES,
        )
        self.variant_lookups_total = self._counter(
            "variant_lookups", "Requests by the level of their delta at admission", result=LOOKUPS
        )

    def _define_residency(self) -> None:
        self.slots = self._gauge("slots", "Slots for deltas in device memory")
        self.slots_in_use = self._gauge("slots_in_use", "Slots that hold a delta or are being filled")
        self.slots_pinned = self._gauge("slots_pinned", "Slots whose delta is never evicted")
        self.variants_resident = self._gauge("variants_resident", "Deltas in memory, by level", level=LEVELS)
        self.variant_resident = self._gauge(
            "variant_resident", "1 while the variant is in memory", variant=(), level=()
        )
        self.variant_evictions_total = self._counter(
            "variant_evictions", "Deltas evicted from memory", level=LEVELS, reason=EVICTION_REASONS
        )
        self.host_cache_bytes = self._gauge("host_cache_bytes", "Host memory used by the host cache")
        self.host_cache_limit_bytes = self._gauge("host_cache_limit_bytes", "Size limit of the host cache")
        self.device_memory_bytes = self._gauge(
            "device_memory_bytes", "Device memory by use", kind=MEMORY_KINDS
        )

    def _define_requests(self) -> None:
        self.num_requests_running = self._gauge("num_requests_running", "Requests that run")
        self.num_requests_waiting = self._gauge("num_requests_waiting", "Admitted requests that wait")
        self.num_requests_waiting_by_reason = self._gauge(
            "num_requests_waiting_by_reason", "Admitted requests that wait, by reason", reason=WAIT_REASONS
        )
        self.request_queue_seconds = self._histogram(
            "request_queue_seconds", "From admission to the first step"
        )
        self.time_to_first_token_seconds = self._histogram(
            "time_to_first_token_seconds", "From admission to the first token"
        )
        self.inter_token_latency_seconds = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a request"
        )
        self.e2e_request_latency_seconds = self._histogram(
            "e2e_request_latency_seconds", "From admission to the last token"
        )
        self.prompt_tokens_total = self._counter("prompt_tokens", "Prompt tokens processed")
        self.generation_tokens_total = self._counter("generation_tokens", "Tokens generated")
        self.admission_rejections_total = self._counter(
            "admission_rejections", "Requests that were refused", reason=REJECTIONS
        )
        self.http_requests_total = self._counter(
            "http_requests", "HTTP requests by route and status", route=(), code=()
        )

    def _define_variants_and_tenants(self) -> None:
        self.variant_requests_total = self._counter(
            "variant_requests", "Finished requests", variant=(BASE,), finish_reason=FINISH_REASONS
        )
        self.variant_tokens_total = self._counter(
            "variant_tokens", "Tokens processed and generated", variant=(BASE,), kind=KINDS
        )
        self.variant_active_version = self._gauge(
            "variant_active_version", "Version that requests without a version get", variant=()
        )
        self.tenant_requests_total = self._counter(
            "tenant_requests", "HTTP requests by status", tenant=(), code=()
        )
        self.tenant_tokens_total = self._counter(
            "tenant_tokens", "Tokens processed and generated", tenant=(), kind=()
        )
        self.tenant_rejections_total = self._counter(
            "tenant_rejections", "Requests that were refused", tenant=(), reason=()
        )
        self._per_variant = (
            self.variant_resident,
            self.variant_requests_total,
            self.variant_tokens_total,
            self.variant_active_version,
        )

    def _define_engine(self) -> None:
        self.step_seconds = self._histogram("step_seconds", "Time of one step of the engine")
        self.batch_requests = self._histogram("batch_requests", "Requests in a step", BATCH_BUCKETS)
        self.kv_cache_usage_ratio = self._gauge(
            "kv_cache_usage_ratio", "Share of the KV cache's pages that running requests use"
        )
        self.prefix_cache_queries_total = self._counter(
            "prefix_cache_queries", "Tokens looked up in the prefix cache"
        )
        self.prefix_cache_hits_total = self._counter("prefix_cache_hits", "Tokens found in the prefix cache")
        self.preemptions_total = self._counter(
            "preemptions", "Sequences whose pages were freed and that are computed again"
        )
        self.batch_distinct_variants = self._histogram(
            "batch_distinct_variants", "Different deltas in a step, without the base", (0, *BATCH_BUCKETS)
        )

    def _define_registry_and_process(self) -> None:
        self.uploads_total = self._counter("uploads", "Uploads by outcome", result=UPLOAD_RESULTS)
        self.upload_bytes_total = self._counter("upload_bytes", "Bytes of artifacts received")
        self.registry_objects = self._gauge("registry_objects", "Artifacts in the registry")
        self.registry_bytes = self._gauge("registry_bytes", "Bytes of the registry's artifacts")
        self.registry_free_bytes = self._gauge(
            "registry_free_bytes", "Free bytes of the registry's file system"
        )
        self.registry_quarantined = self._gauge("registry_quarantined", "Quarantined artifacts")
        self.ready = self._gauge("ready", "1 while requests are admitted")
        build_info = self._gauge(
            "build_info", "Always 1; the label is the version", version=(version("peraxis"),)
        )
        build_info.labels(version=version("peraxis")).set(1)

    def _counter(self, name: str, text: str, **labels: Iterable[str]) -> Counter:
        return self._with_series(Counter, name, text, labels)

    def _gauge(self, name: str, text: str, **labels: Iterable[str]) -> Gauge:
        return self._with_series(Gauge, name, text, labels)

    def _histogram(
        self, name: str, text: str, buckets: Iterable[float] = LATENCY_BUCKETS, **labels: Iterable[str]
    ) -> Histogram:
        return self._with_series(Histogram, name, text, labels, buckets=tuple(buckets))

    def _with_series(
        self, kind: Callable[..., M], name: str, text: str, labels: dict[str, Iterable[str]], **more: Any
    ) -> M:
        """Define a metric and every combination of its given label values."""
        metric = kind(PREFIX + name, text, tuple(labels), registry=self.registry, **more)
        if labels:
            for values in itertools.product(*labels.values()):
                metric.labels(*values)
        return metric
