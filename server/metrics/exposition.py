"""Prometheus' text of the whole service. Knows how a scrape is answered, not how snapshots arrive."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from server.metrics.labels import BASE, OTHER
from server.metrics.service import RegistryState, service_families
from server.metrics.snapshot import Family, Series, Snapshot
from server.metrics.vllm_names import vllm_families

CONTENT_TYPE = CONTENT_TYPE_LATEST


def variant_labels(snapshot: Snapshot) -> frozenset[str]:
    """Return the label of each variant that has series of its own."""
    return frozenset(
        series.labels[family.label_names.index("variant")]
        for family in snapshot.families
        if "variant" in family.label_names
        for series in family.series
    ) - {BASE, OTHER}


def compose(snapshot: Snapshot, state: RegistryState | None, *, is_ready: bool) -> bytes:
    """Render all metrics of the service, without the series of deleted variants.

    Args:
        snapshot: of all processes together, taken before the registry was read.
        state: the registry's state for the variants' labels there. None if it cannot be read; all variants then keep
            their series, also those that a process has not forgotten yet.
        is_ready: requests for tokens are admitted.
    """
    deleted = frozenset() if state is None else state.deleted
    families = [_without(family, deleted) for family in snapshot.families]
    service = service_families(state, is_ready=is_ready)
    return render(Snapshot((*families, *vllm_families(families), *service)))


def render(snapshot: Snapshot) -> bytes:
    """Return a snapshot in Prometheus' text format."""
    return generate_latest(_Collected(snapshot))


class _Collected(Collector):
    """A snapshot as prometheus_client's exposition takes it."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        return map(_metric, self._snapshot.families)


def _without(family: Family, variants: frozenset[str]) -> Family:
    if "variant" not in family.label_names or not variants:
        return family
    index = family.label_names.index("variant")
    series = tuple(each for each in family.series if each.labels[index] not in variants)
    return msgspec.structs.replace(family, series=series)


def _metric(family: Family) -> Metric:
    arguments = (family.name, family.documentation)
    if family.type == "histogram":
        histogram = HistogramMetricFamily(*arguments, labels=family.label_names)
        bounds = ["+Inf" if math.isinf(bound) else str(bound) for bound in family.bounds]
        for series in family.series:
            cumulative = itertools.accumulate(series.counts)
            histogram.add_metric(series.labels, list(zip(bounds, cumulative, strict=True)), series.value)
            histogram.samples.append(_created(family, series))
        return histogram
    if family.type == "counter":
        counter = CounterMetricFamily(*arguments, labels=family.label_names)
        for series in family.series:
            counter.add_metric(series.labels, series.value, series.created)
        return counter
    gauge = GaugeMetricFamily(*arguments, labels=family.label_names)
    for series in family.series:
        gauge.add_metric(series.labels, series.value)
    return gauge


def _created(family: Family, series: Series) -> Sample:
    labels = dict(zip(family.label_names, series.labels, strict=True))
    return Sample(f"{family.name}_created", labels, series.created or 0.0)
