"""Prometheus' text of the whole service, with what a scrape reads of the registry.

Tenants size what is read: neither the supervisor nor the engine reads it, and nothing of it is kept.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from deltastore.errors import PeraxisError, RegistryError, RegistryUnavailable, VariantNotFound
from deltastore.registry import Registry
from deltastore.registry.records import Usage
from server.metrics.instruments import (
    BASE,
    MAX_LABEL_VALUES,
    OTHER,
    PREFIX,
    Family,
    Series,
    Snapshot,
    variant_label,
)
from server.metrics.metrics import vllm_families
from server.registry_calls import RegistryCalls

log = logging.getLogger(__name__)

# Variants that cannot be read before a scrape goes on without the registry.
MAX_FAILURES = 3


@dataclass(frozen=True, slots=True)
class RegistryState:
    """The part of a registry that a scrape shows, at one moment.

    Attributes:
        active: the active versions of variants by label.
        deleted: labels that were asked for, of variants that do not exist.
    """

    usage: Usage
    active: Mapping[str, int]
    deleted: frozenset[str] = frozenset()


def read_registry(
    registry: Registry, labels: Collection[str], usage: Usage | None = None
) -> RegistryState | None:
    """Return the registry's state; None if it cannot be read. Reads records of at most `MAX_LABEL_VALUES` variants.

    Args:
        registry: the registry.
        labels: of variants that other metrics show; their active versions come first.
        usage: a count that is new enough; None counts the registry's objects.
    """
    try:
        return _read(registry, labels, usage or registry.usage())
    except PeraxisError as error:
        # The watch of the registry's calls logs a volume that fails.
        if not isinstance(error, RegistryUnavailable):
            log.error("metrics without the registry: %s", error)
        return None


def service_families(state: RegistryState | None, *, is_ready: bool) -> tuple[Family, ...]:
    """Return the gauges of the service; without a registry's state, none of its contents."""
    contents = () if state is None else (_active_versions(state.active), *_sizes(state.usage))
    return (
        *contents,
        _gauge("registry_up", "1 while the registry can be read", state is not None),
        _gauge("ready", "1 while requests are admitted", is_ready),
        Family(
            f"{PREFIX}build_info",
            "Always 1; the label is the version",
            "gauge",
            ("version",),
            (Series((version("peraxis"),), 1.0),),
        ),
    )


def _read(registry: Registry, labels: Collection[str], usage: Usage) -> RegistryState:
    asked: dict[str, set[str]] = {}
    for label in sorted(labels):
        tenant, _, name = label.partition("/")
        asked.setdefault(tenant, set()).add(name)
    existing = {tenant: sorted(found.intersection(registry.names(tenant))) for tenant, found in asked.items()}
    deleted = set(labels) - {variant_label(*each) for each in _in_turns(existing)}
    # The others only as far as there is space, so that their names are listed only then.
    candidates = itertools.chain(_in_turns(existing), _others(registry, asked))
    active: dict[str, int] = {}
    num_failures = 0
    for tenant, name in itertools.islice(candidates, MAX_LABEL_VALUES):
        try:
            number = registry.summary(tenant, name).active
        except VariantNotFound:
            deleted.add(variant_label(tenant, name))
        except RegistryError as error:
            log.error("variant %s/%s is not shown: %s", tenant, name, error)
        except RegistryUnavailable as error:
            log.error("variant %s/%s is not shown: %s", tenant, name, error)
            # One file may be unreadable; more are the store itself, which 200 calls must not wait for.
            num_failures += 1
            if num_failures == MAX_FAILURES:
                raise
        else:
            if number is not None:
                active[variant_label(tenant, name)] = number
    return RegistryState(usage, active, frozenset(deleted).intersection(labels))


def _others(registry: Registry, asked: Mapping[str, Collection[str]]) -> Iterator[tuple[str, str]]:
    """Yield variants that were not asked for."""
    # Each tenant has one at least.
    listed = registry.tenants()[:MAX_LABEL_VALUES]
    yield from _in_turns(
        {
            tenant: [name for name in registry.names(tenant) if name not in asked.get(tenant, ())]
            for tenant in listed
        }
    )


def _in_turns(names_of: Mapping[str, Iterable[str]]) -> Iterator[tuple[str, str]]:
    """Yield tenants' variants, one of each tenant in turn."""
    by_tenant = [[(tenant, name) for name in found] for tenant, found in names_of.items()]
    for turn in itertools.zip_longest(*by_tenant):
        yield from (each for each in turn if each is not None)


def _active_versions(active: Mapping[str, int]) -> Family:
    return Family(
        f"{PREFIX}variant_active_version",
        "Version that requests without a version get",
        "gauge",
        ("variant",),
        tuple(Series((label,), float(number)) for label, number in active.items()),
    )


def _sizes(usage: Usage) -> tuple[Family, ...]:
    return (
        _gauge("registry_objects", "Artifacts in the registry", usage.num_objects),
        _gauge("registry_bytes", "Bytes of the registry's artifacts", usage.num_bytes),
        _gauge("registry_quarantined", "Quarantined artifacts", usage.num_quarantined),
        *_free(usage.free_bytes),
    )


def _free(num_bytes: int | None) -> tuple[Family, ...]:
    # A bucket has no number of free bytes.
    if num_bytes is None:
        return ()
    return (_gauge("registry_free_bytes", "Free bytes of the registry's file system", num_bytes),)


def _gauge(name: str, documentation: str, value: float) -> Family:
    return Family(PREFIX + name, documentation, "gauge", (), (Series((), float(value)),))


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


# A registry that has not answered by then is left out.
READ_S = 2.0
# Between two counts of the registry's objects.
COUNT_S = 60.0


class RegistryScrapes:
    """Reads a registry for scrapes, one at a time. Event loop only."""

    def __init__(self, registry: Registry, calls: RegistryCalls) -> None:
        self._registry = registry
        self._calls = calls
        self._has_answered = True
        self._reading: asyncio.Task[RegistryState | None] | None = None
        self._usage: Usage | None = None
        self._counted_at = 0.0

    async def read(self, labels: frozenset[str]) -> RegistryState | None:
        """Return the registry's state; None if it cannot be read, or if it does not answer within `READ_S`."""
        # At most one thread waits for a file system that hangs. What a scrape before this one asked for is as good.
        reading = self._reading
        if reading is None:
            reading = self._reading = asyncio.create_task(self._read(labels))
        await asyncio.wait([reading], timeout=READ_S)
        if reading.done():
            self._has_answered = True
            return reading.result()
        if self._has_answered:
            log.error("metrics without the registry: it does not answer within %g s", READ_S)
        self._has_answered = False
        return None

    async def _read(self, labels: frozenset[str]) -> RegistryState | None:
        is_new = self._usage is not None and time.monotonic() - self._counted_at < COUNT_S
        usage = self._usage if is_new else None
        try:
            state = await self._calls.run_long(partial(read_registry, self._registry, labels, usage), None)
        except RegistryUnavailable:
            return None
        finally:
            self._reading = None
        if state is not None and not is_new:
            self._usage, self._counted_at = state.usage, time.monotonic()
        return state
