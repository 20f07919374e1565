"""Every metric that the engine and HTTP processes count, under its own name and under vLLM's.

`vllm_families` shows gauges and times that the service has under its own names again, from the merged snapshot. The
engine counts here what vLLM writes into labels. Names, labels and types are those of `vllm/v1/metrics/loggers.py` in
vLLM and of `docs/proposals/003-model-server-protocol` in the gateway API inference extension.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from operator import add
from typing import TYPE_CHECKING

from deltastore.errors import ArtifactError, PeraxisError, VariantNotFound, VariantQuarantined
from deltastore.registry.records import VersionRecord
from server.errors import Draining, EngineRestarted, QueueFull, RateLimited
from server.metrics.instruments import (
    BASE,
    BATCH_BUCKETS,
    COLD_LOOKUPS,
    EVICTION_REASONS,
    FINISH_REASONS,
    KINDS,
    LEVELS,
    LOAD_FAILURES,
    LOOKUPS,
    MEMORY_KINDS,
    OTHER,
    PREFIX,
    REJECTIONS,
    SOURCES,
    STAGES,
    UPLOAD_RESULTS,
    WAIT_REASONS,
    Family,
    MetricSet,
    Series,
    VariantLabels,
    variant_label,
)
from server.protocol.messages import Level, Timings
from server.protocol.request import Request

if TYPE_CHECKING:
    from deltastore.loader import LoadReport

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
        # Each process counts the kinds that it knows.
        self.tenant_seconds_total = self.labelled_counter(
            "tenant_seconds",
            "Seconds of shared threads, by kind; no tenant is a caller without a valid key",
            tenant=(),
            kind=(),
        )
        self.variant_requests_total = self.labelled_counter(
            "variant_requests", "Finished requests", variant=(BASE,), finish_reason=FINISH_REASONS
        )
        # Beside those by variant, which go with their variant.
        self.finished_requests_total = self.labelled_counter(
            "finished_requests", "Finished requests of all variants", finish_reason=FINISH_REASONS
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
        self.finished_requests_total.labels(finish_reason=reason).inc()
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


class FrontendMetrics(RequestMetrics):
    """Metrics of one HTTP process: its replies, its uploads, and the requests that it refuses or loses itself."""

    def __init__(self, *, process: bool = False) -> None:
        super().__init__(process=process)
        self.http_requests_total = self.labelled_counter(
            "http_requests", "HTTP requests by route and status", route=(), code=()
        )
        self.tenant_requests_total = self.labelled_counter(
            "tenant_requests", "HTTP requests by status", tenant=(), code=()
        )
        self.uploads_total = self.labelled_counter("uploads", "Uploads by outcome", result=UPLOAD_RESULTS)
        self.upload_bytes_total = self.counter("upload_bytes", "Bytes of artifacts received")


VLLM_PREFIX = "vllm:"
# Labels that vLLM gives its metrics; a service has one base and one engine.
COMMON_NAMES, COMMON_VALUES = ("model_name", "engine"), (BASE, "0")
# vLLM's gauges by their name here, without the prefixes.
GAUGES: Mapping[str, str] = {
    "num_requests_waiting": "num_requests_waiting",
    "num_requests_running": "num_requests_running",
    "kv_cache_usage_perc": "kv_cache_usage_ratio",
    # An older name in vLLM, which production-stack's router reads.
    "gpu_cache_usage_perc": "kv_cache_usage_ratio",
    "max_gpu_lora_adapters": "slots",
}
# vLLM's counters by their name here, without the prefixes; the names with `gpu` are those of production-stack's router.
COUNTERS: Mapping[str, str] = {
    "prefix_cache_queries": "prefix_cache_queries",
    "prefix_cache_hits": "prefix_cache_hits",
    "gpu_prefix_cache_queries": "prefix_cache_queries",
    "gpu_prefix_cache_hits": "prefix_cache_hits",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "num_preemptions": "preemptions",
}
# vLLM's histograms likewise, which its dashboard shows.
HISTOGRAMS: Mapping[str, str] = {
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "e2e_request_latency_seconds": "e2e_request_latency_seconds",
    "request_queue_time_seconds": "request_queue_seconds",
}
# vLLM's reasons for which a request is over, by those here.
VLLM_REASONS: Mapping[str, str] = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}
# vLLM's counts of adapters: the label `level` of `variants_resident`, and the help text.
COUNTS: Mapping[str, tuple[str, str]] = {
    "num_gpu_loaded_lora_adapters": ("device", "Deltas in slots"),
    "num_cpu_loaded_lora_adapters": ("host", "Deltas in the host cache"),
}
# The labels (source, stage) of `variant_load_seconds` that make up vLLM's transitions of an adapter: from disk to host
# memory, without a download before it, and from there into a slot.
TRANSITIONS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "load": (("disk", "read"), ("store", "read")),
    "activate": (("disk", "copy"), ("store", "copy"), ("host", "copy")),
}
# Levels of a delta in memory, and the word for each in vLLM.
VLLM_LEVELS: Mapping[str, str] = {"device": "gpu", "host": "cpu"}
# vLLM's label of a LoRA adapter's rank; a delta has none.
NO_RANK = "0"


class VllmMetrics:
    """Metrics of the engine that vLLM writes into labels. Thread-safe.

    Each method replaces the label sets of the call before it, so that no router reads a state that is over.
    """

    def __init__(self, metrics: MetricSet) -> None:
        self.lora_adapter_loaded = metrics.labelled_gauge(
            f"{VLLM_PREFIX}lora_adapter_loaded",
            "1 while the adapter is in memory",
            **dict.fromkeys((*COMMON_NAMES, "adapter_name", "level", "pinned", "rank"), ()),
        )
        self.lora_requests_info = metrics.labelled_gauge(
            f"{VLLM_PREFIX}lora_requests_info",
            "Time of the last change of adapters with requests",
            max_lora=(),
            running_lora_adapters=(),
            waiting_lora_adapters=(),
        )
        self.cache_config_info = metrics.labelled_gauge(
            f"{VLLM_PREFIX}cache_config_info",
            "Always 1; the labels are the sizes of the KV cache",
            block_size=(),
            num_gpu_blocks=(),
            engine=(),
        )
        self._lock = threading.Lock()
        self._max_lora = 0
        self._adapters: frozenset[tuple[str, ...]] = frozenset()
        self._requests: tuple[str, ...] | None = None

    def show_sizes(self, num_slots: int, page_tokens: int, num_pages: int) -> None:
        """Show the sizes of the engine's memory, which stay while it runs."""
        self.cache_config_info.labels(str(page_tokens), str(num_pages), COMMON_VALUES[1]).set(1)
        self._max_lora = num_slots
        self.show_requests((), ())

    def show_requests(self, running: Iterable[str], waiting: Iterable[str]) -> None:
        """Show the names of variants with running and with waiting requests."""
        labels = (str(self._max_lora), ",".join(sorted(running)), ",".join(sorted(waiting)))
        with self._lock:
            before, self._requests = self._requests, labels
            # Before the old series goes, so that a scrape always finds one.
            self.lora_requests_info.labels(*labels).set(time.time())
            if before not in (None, labels):
                self.lora_requests_info.remove(*before)

    def show_adapters(self, levels: Mapping[str, str], pinned: Collection[str]) -> None:
        """Show the variants in memory.

        Args:
            levels: ``device`` or ``host`` by the variant's name.
            pinned: names of pinned variants.
        """
        adapters: frozenset[tuple[str, ...]] = frozenset(
            (*COMMON_VALUES, name, VLLM_LEVELS[level], str(name in pinned).lower(), NO_RANK)
            for name, level in levels.items()
        )
        with self._lock:
            for labels in adapters - self._adapters:
                self.lora_adapter_loaded.labels(*labels).set(1)
            for labels in self._adapters - adapters:
                self.lora_adapter_loaded.remove(*labels)
            self._adapters = adapters


def vllm_families(families: Iterable[Family]) -> tuple[Family, ...]:
    """Return the families of a merged snapshot that vLLM has under other names."""
    by_name = {family.name.removeprefix(PREFIX): family for family in families}
    gauges = [
        _gauge(name, by_name[ours].documentation, by_name[ours].series[0].value)
        for name, ours in GAUGES.items()
    ]
    counters = [_renamed(name, by_name[ours]) for name, ours in (*COUNTERS.items(), *HISTOGRAMS.items())]
    resident = {series.labels[0]: series.value for series in by_name["variants_resident"].series}
    counts = [_gauge(name, text, resident[level]) for name, (level, text) in COUNTS.items()]
    ended = _ended_requests(by_name["finished_requests"])
    return (*gauges, *counters, ended, *counts, _load_seconds(by_name["variant_load_seconds"]))


def _gauge(name: str, documentation: str, value: float) -> Family:
    return Family(VLLM_PREFIX + name, documentation, "gauge", COMMON_NAMES, (Series(COMMON_VALUES, value),))


def _renamed(name: str, ours: Family) -> Family:
    """Return a counter or a histogram with one series under vLLM's name."""
    (series,) = ours.series
    shown = Series(COMMON_VALUES, series.value, series.counts, series.created)
    return Family(VLLM_PREFIX + name, ours.documentation, ours.type, COMMON_NAMES, (shown,), ours.bounds)


def _ended_requests(ours: Family) -> Family:
    """Return the number of requests that ended, by vLLM's reason."""
    series = tuple(
        Series((*COMMON_VALUES, VLLM_REASONS[each.labels[0]]), each.value, (), each.created)
        for each in ours.series
    )
    labels = (*COMMON_NAMES, "finished_reason")
    return Family(f"{VLLM_PREFIX}request_success", ours.documentation, "counter", labels, series)


def _load_seconds(ours: Family) -> Family:
    """Return the histogram of loads with vLLM's label `transition`."""
    by_labels = {
        (
            series.labels[ours.label_names.index("source")],
            series.labels[ours.label_names.index("stage")],
        ): series
        for series in ours.series
    }
    return Family(
        f"{VLLM_PREFIX}lora_adapter_load_seconds",
        "Time to bring an adapter into host memory, and from there into its slot",
        "histogram",
        (*COMMON_NAMES, "transition"),
        tuple(
            _sum((*COMMON_VALUES, transition), [by_labels[labels] for labels in stages])
            for transition, stages in TRANSITIONS.items()
        ),
        ours.bounds,
    )


def _sum(labels: tuple[str, ...], parts: list[Series]) -> Series:
    counts = parts[0].counts
    for part in parts[1:]:
        counts = tuple(map(add, counts, part.counts))
    created = [part.created for part in parts if part.created is not None]
    return Series(labels, sum(part.value for part in parts), counts, min(created, default=None))


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
        # Seconds that are not counted yet, by tenant and kind.
        self._seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
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

    def seconds(self, tenant: str, kind: str, seconds: float) -> None:
        """Count seconds of the engine's thread; `kind` is ``step`` or ``sample``."""
        self._seconds[tenant, kind] += seconds

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
        for (tenant, kind), seconds in self._seconds.items():
            metrics.tenant_seconds_total.labels(tenant, kind).inc(seconds)
        self._seconds.clear()


def _owner_of(request: Request) -> str:
    """Return the tenant whose variant the request uses, which may be public; the request's own for the base."""
    return request.tenant if request.record is None else request.record.tenant


def _subtract_one(counts: Counter[str], name: str) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]


FAILURES: dict[type[PeraxisError], str] = {
    VariantQuarantined: "corrupt",
    ArtifactError: "corrupt",
    VariantNotFound: "missing",
}


class ResidencyMetrics:
    """Counts for two levels: ``device`` on the engine thread, ``host`` on loader threads."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self._lock = threading.Lock()
        # The versions in memory, by their label and level: the labels of their series, and the names of their variants.
        self._shown: dict[tuple[str, str], tuple[str, str]] = {}
        # Versions behind a series, by its label and level.
        self._num_behind: Counter[tuple[str, str]] = Counter()
        self._pinned: frozenset[str] = frozenset()  # labels of versions

    def loaded(self, record: VersionRecord, report: LoadReport) -> None:
        """Count a delta that was loaded into its slot."""
        stages = {"copy": report.copy_s, "total": report.total_s}
        if report.source == "store":
            stages["fetch"] = report.fetch_s
        if report.source != "host":
            stages["read"] = report.read_s
        for stage, seconds in stages.items():
            self._metrics.variant_load_seconds.labels(source=report.source, stage=stage).observe(seconds)
        self._metrics.variant_load_bytes_total.labels(source=report.source).inc(report.device_bytes)
        self.arrived(record, "device")

    def load_failed(self, error: PeraxisError) -> None:
        """Count a failed load by the class of its error."""
        reason = next((FAILURES[kind] for kind in type(error).__mro__ if kind in FAILURES), "error")
        self._metrics.variant_load_failures_total.labels(reason=reason).inc()

    def arrived(self, record: VersionRecord, level: str) -> None:
        """Count a delta that is at a level from now on."""
        with self._lock:
            label = self._metrics.variant_label(record.tenant, record.name)
            self._shown[record.label, level] = (label, record.name)
            self._num_behind[label, level] += 1
            self._metrics.variant_resident.labels(variant=label, level=level).set(1)
            self._show_adapters()

    def evicted(self, record: VersionRecord, level: str, reason: str) -> None:
        """Count a delta that left a level, and remove its variant's series unless another version is there."""
        self._metrics.variant_evictions_total.labels(level=level, reason=reason).inc()
        with self._lock:
            label, _ = self._shown.pop((record.label, level))
            self._num_behind[label, level] -= 1
            if not self._num_behind[label, level]:
                del self._num_behind[label, level]
                self._metrics.variant_resident.remove(label, level)
            self._show_adapters()

    def pinned(self, versions: frozenset[str]) -> None:
        """Take note of all pinned versions."""
        if self._pinned != versions:
            with self._lock:
                self._pinned = versions
                self._show_adapters()

    def slots(self, num_used: int, num_pinned: int, num_resident: int) -> None:
        """Set the gauges of slots."""
        self._metrics.slots_in_use.set(num_used)
        self._metrics.slots_pinned.set(num_pinned)
        self._metrics.variants_resident.labels(level="device").set(num_resident)

    def host_cache(self, num_resident: int, num_bytes: int) -> None:
        """Set the gauges of the host cache."""
        self._metrics.variants_resident.labels(level="host").set(num_resident)
        self._metrics.host_cache_bytes.set(num_bytes)

    def _show_adapters(self) -> None:
        """Show the names of variants in memory, each at its best level, under vLLM's metric."""
        levels: dict[str, str] = {}
        for (_, level), (_, name) in self._shown.items():
            if levels.get(name) != "device":
                levels[name] = level
        pinned = {name for (version, _), (_, name) in self._shown.items() if version in self._pinned}
        self._metrics.vllm.show_adapters(levels, pinned)
