"""Plain values of one process's metrics, which msgspec can encode, and how to take them.

`take_snapshot` reads the values of prometheus_client's metrics directly, because `collect` makes an object per sample:
5 ms for an engine with 200 variants, between two of whose steps a snapshot is taken.
"""

from __future__ import annotations

from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

Instrument = Counter | Gauge | Histogram


class Series(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One series of a family.

    Attributes:
        labels: values of the family's `label_names`, in their order.
        value: a counter's total, a gauge's value, or the sum of a histogram's observations.
        counts: a histogram's observations in each bucket, without those of lower buckets.
        created: when counting began, in seconds since 1970; None for gauges and the counters of the process.
    """

    labels: tuple[str, ...]
    value: float
    counts: tuple[float, ...] = ()
    created: float | None = None


class Family(msgspec.Struct, frozen=True, array_like=True):
    """One metric and its series.

    Attributes:
        name: without a counter's `_total`.
        type: ``counter``, ``gauge`` or ``histogram``.
        bounds: upper bounds of a histogram's buckets, infinity last.
    """

    name: str
    documentation: str
    type: str
    label_names: tuple[str, ...]
    series: tuple[Series, ...]
    bounds: tuple[float, ...] = ()


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """The metrics of one process, or of the service, at one moment."""

    families: tuple[Family, ...]


def take_snapshot(registry: CollectorRegistry) -> Snapshot:
    """Read every metric of a registry. Thread-safe."""
    families: list[Family] = []
    for collector in tuple(registry._collector_to_names):
        if isinstance(collector, Instrument):
            families.append(_family(collector))
        else:
            # ProcessCollector, whose metrics have one series each and no labels.
            families.extend(
                Family(
                    metric.name,
                    metric.documentation,
                    metric.type,
                    (),
                    tuple(Series((), sample.value) for sample in metric.samples),
                )
                for metric in collector.collect()
            )
    return Snapshot(tuple(families))


def _family(metric: Instrument) -> Family:
    label_names = tuple(metric._labelnames)
    if label_names:
        with metric._lock:
            children: dict[Any, Any] = dict(metric._metrics)
    else:
        children = {(): metric}
    arguments = (metric._name, metric._documentation, str(metric._type), label_names)
    if isinstance(metric, Histogram):
        return Family(*arguments, _histograms(children), tuple(metric._upper_bounds))
    if isinstance(metric, Counter):
        return Family(*arguments, _counters(children))
    return Family(
        *arguments, tuple([Series(labels, gauge._value.get()) for labels, gauge in children.items()])
    )


def _histograms(children: dict[Any, Any]) -> tuple[Series, ...]:
    return tuple(
        Series(labels, child._sum.get(), tuple([bucket.get() for bucket in child._buckets]), child._created)
        for labels, child in children.items()
    )


def _counters(children: dict[Any, Any]) -> tuple[Series, ...]:
    return tuple(
        [Series(labels, child._value.get(), (), child._created) for labels, child in children.items()]
    )
