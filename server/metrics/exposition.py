"""Prometheus' text of the whole service. Knows how a scrape is answered, not how snapshots arrive."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from deltastore.registry import Registry
from server.metrics.aggregator import Aggregator
from server.metrics.labels import variant_label
from server.metrics.service import RegistryState, read_registry, service_families
from server.metrics.snapshot import Family, Series, Snapshot
from server.metrics.vllm_names import vllm_families

CONTENT_TYPE = CONTENT_TYPE_LATEST


class Scrape(NamedTuple):
    """The answer to a scrape."""

    # In the format of CONTENT_TYPE.
    text: bytes
    # `variant` labels of deleted variants, for `forget_variants` in the processes that have counted them.
    deleted: frozenset[str]


def scrape(aggregator: Aggregator, registry: Registry, *, is_ready: bool) -> Scrape:
    """Render all metrics of the service, without the series of deleted variants. Reads files of the registry.

    Call it after `aggregator` has received the snapshots.
    """
    # Before variants are listed, so that one registered meanwhile keeps its series.
    labels = aggregator.variant_labels()
    return compose(aggregator, labels, read_registry(registry), is_ready=is_ready)


def compose(
    aggregator: Aggregator, labels: frozenset[str], state: RegistryState | None, *, is_ready: bool
) -> Scrape:
    """Render all metrics with what was read of the registry.

    Args:
        labels: the aggregator's variants, taken before the registry was read.
        state: None if the registry cannot be read; all variants then keep their series.
    """
    deleted: frozenset[str] = frozenset()
    if state is not None:
        deleted = labels - {variant_label(variant.tenant, variant.name) for variant in state.variants}
    aggregator.forget_variants(deleted)
    service = service_families(state, labels, is_ready=is_ready)
    families = aggregator.merged(without_variants=deleted).families
    return Scrape(render(Snapshot((*families, *vllm_families(families), *service))), deleted)


def render(snapshot: Snapshot) -> bytes:
    """Return a snapshot in Prometheus' text format."""
    return generate_latest(_Collected(snapshot))


class _Collected(Collector):
    """A snapshot as prometheus_client's exposition takes it."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        return map(_metric, self._snapshot.families)


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
