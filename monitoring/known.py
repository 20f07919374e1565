"""The series that a server and Prometheus make: names, labels and known values of labels. Reads no expression."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from deltastore.registry.reports import Usage
from server.metrics.local import LocalMetrics
from server.metrics.service import RegistryState, service_families
from server.metrics.snapshot import Family, take_snapshot
from server.metrics.vllm_names import vllm_families

# Labels that Prometheus' configuration or Kubernetes' service discovery gives every series of a target.
TARGET_LABELS = ("job", "instance", "namespace")
# Labels whose values are not known in advance, although some series may exist from the start.
OPEN_LABELS = frozenset({"variant", "tenant", "route", "code", "version", "le", *TARGET_LABELS})
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}


@dataclass(frozen=True, slots=True)
class KnownSeries:
    """The series of one name.

    Attributes:
        labels: known values by label; None where any value may occur.
    """

    name: str
    labels: Mapping[str, frozenset[str] | None]


def known_series() -> dict[str, KnownSeries]:
    """Return what a server exposes, and the series that Prometheus adds, by name."""
    metrics = LocalMetrics()
    counted = [
        *take_snapshot(metrics.engine.registry).families,
        *take_snapshot(metrics.frontend.registry).families,
    ]
    service = service_families(RegistryState(Usage(0, 0, 0, 0), {}), is_ready=True)
    found = [each for family in (*counted, *vllm_families(counted), *service) for each in _series_of(family)]
    up = KnownSeries("up", dict.fromkeys(TARGET_LABELS))
    return {each.name: each for each in (*found, up)}


def _series_of(family: Family) -> Iterator[KnownSeries]:
    values = {
        name: frozenset(series.labels[index] for series in family.series)
        for index, name in enumerate(family.label_names)
    }
    labels = {name: None if name in OPEN_LABELS else known or None for name, known in values.items()}
    for suffix in SUFFIXES[family.type]:
        bucket = ("le",) if suffix == "_bucket" else ()
        # ProcessCollector names a counter with its suffix or without it, by the version of prometheus_client.
        name = f"{family.name.removesuffix(suffix)}{suffix}" if suffix else family.name
        yield KnownSeries(name, {**labels, **dict.fromkeys((*bucket, *TARGET_LABELS))})
