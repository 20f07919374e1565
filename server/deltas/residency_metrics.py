"""Metrics of deltas in memory: loads, evictions and residency by level. Decides nothing."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from deltastore.errors import ArtifactError, PeraxisError, VariantNotFound, VariantQuarantined
from deltastore.loader import LoadReport
from deltastore.registry.records import VersionRecord
from server.metrics.engine import EngineMetrics

FAILURES: dict[type[PeraxisError], str] = {
    VariantQuarantined: "corrupt",
    ArtifactError: "corrupt",
    VariantNotFound: "missing",
}

# A tenant, and the name of its variant.
Variant = tuple[str, str]


class WantingVersion(NamedTuple):
    """A version that wants a delta."""

    tenant: str
    name: str
    version: int

    @property
    def variant(self) -> Variant:
        return self.tenant, self.name


class ResidencyMetrics:
    """Counts for two levels: ``device`` on the engine thread, ``host`` on loader threads."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self._lock = threading.Lock()
        self._levels: dict[str, set[str]] = {}  # where a delta is, by digest
        self._wanting: dict[str, Counter[Variant]] = {}  # number of versions that want a delta, by digest
        self._labels: dict[tuple[str, Variant, str], str] = {}  # of the series, by digest, variant and level
        self._counts: Counter[tuple[str, str]] = (
            Counter()
        )  # digests and variants behind a series, by label and level
        self._pinned: frozenset[tuple[str, str]] = frozenset()  # digest and name

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
        self.arrived(record.digest, "device")

    def load_failed(self, error: PeraxisError) -> None:
        """Count a failed load by the class of its error."""
        reason = next((FAILURES[kind] for kind in type(error).__mro__ if kind in FAILURES), "error")
        self._metrics.variant_load_failures_total.labels(reason=reason).inc()

    def wanted(self, digest: str, version: WantingVersion) -> None:
        """Show a version's variant wherever its delta is from now on."""
        with self._lock:
            wanting = self._wanting.setdefault(digest, Counter())
            wanting[version.variant] += 1
            if wanting[version.variant] == 1:
                self._show(digest, self._levels.get(digest, ()), version.variant)
                self._show_adapters()

    def unwanted(self, digest: str, version: WantingVersion) -> None:
        """Undo one `wanted`."""
        with self._lock:
            wanting = self._wanting[digest]
            wanting[version.variant] -= 1
            if not wanting[version.variant]:
                del wanting[version.variant]
                self._hide(digest, self._levels.get(digest, ()), version.variant)
                self._show_adapters()
            if not wanting:
                del self._wanting[digest]

    def arrived(self, digest: str, level: str) -> None:
        """Count a delta that is at a level from now on."""
        with self._lock:
            self._levels.setdefault(digest, set()).add(level)
            for variant in self._wanting.get(digest, ()):
                self._show(digest, (level,), variant)
            self._show_adapters()

    def evicted(self, digest: str, level: str, reason: str) -> None:
        """Count a delta that left a level, and remove the series of variants that no other delta keeps there."""
        self._metrics.variant_evictions_total.labels(level=level, reason=reason).inc()
        with self._lock:
            for variant in self._wanting.get(digest, ()):
                self._hide(digest, (level,), variant)
            self._levels[digest].discard(level)
            if not self._levels[digest]:
                del self._levels[digest]
            self._show_adapters()

    def pinned(self, pins: Iterable[tuple[str, str]]) -> None:
        """Take note of all pins, each the digest and the variant's name."""
        pinned = frozenset(pins)
        if self._pinned != pinned:
            with self._lock:
                self._pinned = pinned
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

    def _show(self, digest: str, levels: Iterable[str], variant: Variant) -> None:
        label = self._metrics.variant_label(*variant)
        for level in levels:
            self._labels[digest, variant, level] = label
            self._counts[label, level] += 1
            self._metrics.variant_resident.labels(variant=label, level=level).set(1)

    def _hide(self, digest: str, levels: Iterable[str], variant: Variant) -> None:
        for level in levels:
            label = self._labels.pop((digest, variant, level))
            self._counts[label, level] -= 1
            if not self._counts[label, level]:
                del self._counts[label, level]
                self._metrics.variant_resident.remove(label, level)

    def _show_adapters(self) -> None:
        """Show the names of variants in memory, each at its best level, under vLLM's metric."""
        levels: dict[str, str] = {}
        for _, (_, name), level in self._labels:
            if levels.get(name) != "device":
                levels[name] = level
        names = {(digest, name) for digest, (_, name), _ in self._labels}
        self._metrics.vllm.show_adapters(levels, {name for _, name in self._pinned & names})
