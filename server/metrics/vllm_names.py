"""vLLM's names of what the service measures, for routers that read vLLM's metrics. Decides nothing.

`vllm_families` shows gauges and times that the service has under its own names again, from the merged snapshot. The
engine counts here what vLLM writes into labels. Names, labels and types are those of `vllm/v1/metrics/loggers.py` in
vLLM and of `docs/proposals/003-model-server-protocol` in the gateway API inference extension.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Mapping
from operator import add

from server.metrics.instruments import PREFIX, MetricSet
from server.metrics.labels import BASE
from server.metrics.snapshot import Family, Series

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
}
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
    counters = [_counter(name, by_name[ours]) for name, ours in COUNTERS.items()]
    resident = {series.labels[0]: series.value for series in by_name["variants_resident"].series}
    counts = [_gauge(name, text, resident[level]) for name, (level, text) in COUNTS.items()]
    return (*gauges, *counters, *counts, _load_seconds(by_name["variant_load_seconds"]))


def _gauge(name: str, documentation: str, value: float) -> Family:
    return Family(VLLM_PREFIX + name, documentation, "gauge", COMMON_NAMES, (Series(COMMON_VALUES, value),))


def _counter(name: str, ours: Family) -> Family:
    (series,) = ours.series
    shown = Series(COMMON_VALUES, series.value, (), series.created)
    return Family(VLLM_PREFIX + name, ours.documentation, "counter", COMMON_NAMES, (shown,))


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
