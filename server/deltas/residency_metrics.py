"""Metrics of deltas in memory: loads, evictions and residency by level. Decides nothing."""

from __future__ import annotations

import threading
from collections import Counter

from deltastore.errors import ArtifactError, PeraxisError, VariantNotFound, VariantQuarantined
from deltastore.loader import LoadReport
from deltastore.registry.records import VersionRecord
from server.metrics.engine import EngineMetrics

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
