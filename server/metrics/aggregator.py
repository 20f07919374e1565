"""Adds up the snapshots of a server's processes, and makes the statistics of `/stats` of them.

Counters and histograms grow by what each snapshot has more than the one before it, as Prometheus' `increase` computes
it. So they never decrease when a process ends and another takes its place, and nothing is kept of the one that ended.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from operator import add, sub

import msgspec
from msgspec import Struct

from server.metrics.instruments import (
    BASE,
    LATENCY_BUCKETS,
    MAX_LABEL_VALUES,
    OTHER,
    PREFIX,
    UPLOAD_RESULTS,
    Family,
    Series,
    Snapshot,
    VariantLabels,
    variant_label,
)
from server.metrics.metrics import EngineMetrics, FrontendMetrics
from server.protocol.messages import Resident

# Gauges of which the service has the smallest of its processes' values; all others are added.
SMALLEST = ("process_start_time_seconds", "process_max_fds")
# The source of all metrics at 0, so that they exist before their processes do and between two of them.
_ZERO = object()

_ByLabels = dict[tuple[str, ...], Series]


class Aggregator:
    """The metrics of a service whose processes come and go. Thread-safe.

    A source is any name for one run of one process: a process that replaces another is another source.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: dict[str, Family] = {}  # without series
        self._totals: dict[str, _ByLabels] = {}  # of counters and histograms, by family
        self._last: dict[Hashable, dict[str, _ByLabels]] = {}  # the last snapshot of each source, by family
        # Label values that are not folded into OTHER, by label name.
        self._values: dict[str, set[str]] = {}
        self._variants = VariantLabels()
        self.started(_ZERO)
        for kind in (EngineMetrics, FrontendMetrics):
            self.received(_ZERO, kind().snapshot())

    def started(self, source: Hashable) -> None:
        """Add a process that has counted nothing yet."""
        with self._lock:
            self._last[source] = {}

    def ended(self, source: Hashable) -> None:
        """Drop a process' gauges; what it had counted by its last snapshot stays in the totals."""
        with self._lock:
            self._last.pop(source, None)

    def received(self, source: Hashable, snapshot: Snapshot) -> None:
        """Take a process' next snapshot; ignored if the process has ended.

        Snapshots of one source must arrive in the order in which they were taken.
        """
        with self._lock:
            last = self._last.get(source)
            if last is None:
                return
            for family in snapshot.families:
                self._families.setdefault(family.name, msgspec.structs.replace(family, series=()))
                if family.type != "gauge":
                    self._count(family, last.get(family.name, {}))
                last[family.name] = {series.labels: series for series in family.series}

    def forget_variants(self, labels: Collection[str]) -> None:
        """Remove deleted variants from the totals, so that other variants can have a label."""
        with self._lock:
            for label in labels:
                self._variants.give_back(label)
            for name, totals in self._totals.items():
                label_names = self._families[name].label_names
                if "variant" in label_names:
                    index = label_names.index("variant")
                    self._totals[name] = {
                        values: series for values, series in totals.items() if values[index] not in labels
                    }

    def merged(self) -> Snapshot:
        """Return the metrics of the service."""
        with self._lock:
            return Snapshot(
                tuple(
                    msgspec.structs.replace(family, series=tuple(self._series_of(family).values()))
                    for family in self._families.values()
                )
            )

    def _series_of(self, family: Family) -> _ByLabels:
        if family.type != "gauge":
            return self._totals[family.name]
        merged: _ByLabels = {}
        for last in self._last.values():
            for labels, series in last.get(family.name, {}).items():
                known = merged.get(labels)
                merged[labels] = series if known is None else _merged_gauge(family, known, series)
        return merged

    def _count(self, family: Family, last: _ByLabels) -> None:
        totals = self._totals.setdefault(family.name, {})
        for series in family.series:
            before = last.get(series.labels)
            if series == before:
                continue
            labels = tuple(map(self._bounded, family.label_names, series.labels))
            growth = msgspec.structs.replace(_growth(before, series), labels=labels)
            total = totals.get(labels)
            totals[labels] = growth if total is None else _sum(total, growth)

    def _bounded(self, name: str, value: str) -> str:
        """Return a label's value, or OTHER if the label has `MAX_LABEL_VALUES` others, or as many as its tenant may."""
        if value in (BASE, OTHER):
            return value
        if name == "variant":
            return value if self._variants.take(value) else OTHER
        values = self._values.setdefault(name, set())
        if value in values:
            return value
        if len(values) >= MAX_LABEL_VALUES:
            return OTHER
        values.add(value)
        return value


def _growth(before: Series | None, series: Series) -> Series:
    """Return what a counter or histogram has counted since `before`: all, if it was removed and created again."""
    if before is None or before.created != series.created:
        return series
    counts = tuple(map(sub, series.counts, before.counts))
    return Series(series.labels, series.value - before.value, counts, series.created)


def _sum(total: Series, growth: Series) -> Series:
    created = [series.created for series in (total, growth) if series.created is not None]
    counts = tuple(map(add, total.counts, growth.counts))
    return Series(total.labels, total.value + growth.value, counts, min(created, default=None))


def _merged_gauge(family: Family, one: Series, other: Series) -> Series:
    merge = min if family.name in SMALLEST else add
    return Series(one.labels, merge(one.value, other.value))


class DurationStats(Struct, frozen=True, kw_only=True):
    """Durations of one kind since the server started.

    Attributes:
        source: ``disk``, ``host`` or ``store``, where the delta came from; None where it does not matter.
        stage: of a load: ``fetch``, ``read``, ``copy`` or ``total``; None of others.
        count: how many.
        sum_s: all of them, in seconds.
        buckets: counts between the bounds `duration_bounds_s`, without those of lower buckets; the last is above all.
    """

    source: str | None = None
    stage: str | None = None
    count: int
    sum_s: float
    buckets: tuple[int, ...]


class VariantStats(Struct, frozen=True, kw_only=True):
    """A version whose delta is in device or host memory.

    `level` is ``device`` or ``host``; `num_requests` are admitted and not answered in full. `pinned` and
    `num_requests` are the version's own, and the totals those of all versions of its variant.
    """

    tenant: str
    name: str
    version: int
    digest: str
    device_bytes: int
    level: str
    pinned: bool
    num_requests: int
    finished: int  # requests
    tokens: int  # prompt and generated


class RequestStats(Struct, frozen=True, kw_only=True):
    """Requests of all variants and of the base; those that wait for a load are also counted in `waiting`."""

    running: int
    waiting: int
    waiting_for_load: int
    finished: int
    prompt_tokens: int
    generation_tokens: int


class EngineStats(Struct, frozen=True, kw_only=True):
    """The engine and its memory."""

    steps: int
    step_requests: int  # sum of the requests in each step
    step_variants: int  # sum of the different deltas in each step, without the base
    preemptions: int
    kv_cache_usage: float  # share of the pages, 0 to 1
    device_memory_bytes: dict[str, int]  # by use: base, slots, kv, other
    slots: int
    slots_in_use: int
    slots_pinned: int
    host_cache_bytes: int
    host_cache_limit_bytes: int


class UploadStats(Struct, frozen=True, kw_only=True):
    """Uploads by outcome, and their bytes."""

    created: int
    duplicate: int
    rejected: int
    failed: int
    num_bytes: int


class ServerStats(Struct, frozen=True, kw_only=True):
    """A server at one moment.

    Attributes:
        at: in seconds since 1970.
        duration_bounds_s: upper bounds of the buckets of all durations; one bucket more has what is longer.
        loads: by source and stage.
        first_token: of all requests, from admission to the first token.
        cold_starts: by source, from the admission of a request whose delta was in no slot to its first token.
    """

    at: float
    duration_bounds_s: tuple[float, ...]
    loads: tuple[DurationStats, ...]
    first_token: DurationStats
    cold_starts: tuple[DurationStats, ...]
    requests: RequestStats
    engine: EngineStats
    uploads: UploadStats
    variants: tuple[VariantStats, ...]  # the most recently used last


def stats_of(snapshot: Snapshot, residents: Iterable[Resident], at: float) -> ServerStats:
    """Return the statistics of a moment.

    Args:
        snapshot: the metrics of the whole server.
        residents: the versions whose deltas are in memory.
        at: the time in seconds since 1970.
    """
    values = _Values({family.name.removeprefix(PREFIX): family.series for family in snapshot.families})
    return ServerStats(
        at=at,
        duration_bounds_s=LATENCY_BUCKETS,
        first_token=values.durations("time_to_first_token_seconds")[0],
        loads=values.durations("variant_load_seconds"),
        cold_starts=values.durations("cold_start_seconds"),
        requests=_requests(values),
        engine=_engine(values),
        uploads=_uploads(values),
        variants=tuple(_variant(resident, values) for resident in residents),
    )


@dataclass(frozen=True, slots=True)
class _Values:
    """The series of a snapshot, by name without the prefix; no series of an absent family."""

    series: Mapping[str, tuple[Series, ...]]

    def total(self, name: str, *labels: str) -> int:
        """Return the whole part of `sum_of`."""
        return int(self.sum_of(name, *labels))

    def sum_of(self, name: str, *labels: str) -> float:
        """Return the sum of a family's series whose first labels are these."""
        found = self.series.get(name, ())
        return sum(each.value for each in found if each.labels[: len(labels)] == labels)

    def count(self, name: str) -> int:
        """Return the number of a histogram's observations."""
        return int(sum(sum(each.counts) for each in self.series.get(name, ())))

    def durations(self, name: str) -> tuple[DurationStats, ...]:
        """Return a histogram of seconds whose labels are none, the source, or the source and the stage."""
        return tuple(
            DurationStats(
                **dict(zip(("source", "stage"), each.labels, strict=False)),
                count=int(sum(each.counts)),
                sum_s=each.value,
                buckets=tuple(map(int, each.counts)),
            )
            for each in self.series.get(name, ())
        )


def _requests(values: _Values) -> RequestStats:
    return RequestStats(
        running=values.total("num_requests_running"),
        waiting=values.total("num_requests_waiting"),
        waiting_for_load=values.total("num_requests_waiting_by_reason", "variant_load"),
        finished=values.count("e2e_request_latency_seconds"),
        prompt_tokens=values.total("prompt_tokens"),
        generation_tokens=values.total("generation_tokens"),
    )


def _engine(values: _Values) -> EngineStats:
    memory = {series.labels[0]: int(series.value) for series in values.series.get("device_memory_bytes", ())}
    return EngineStats(
        steps=values.count("step_seconds"),
        step_requests=values.total("batch_requests"),
        step_variants=values.total("batch_distinct_variants"),
        preemptions=values.total("preemptions"),
        kv_cache_usage=values.sum_of("kv_cache_usage_ratio"),
        device_memory_bytes=memory,
        slots=values.total("slots"),
        slots_in_use=values.total("slots_in_use"),
        slots_pinned=values.total("slots_pinned"),
        host_cache_bytes=values.total("host_cache_bytes"),
        host_cache_limit_bytes=values.total("host_cache_limit_bytes"),
    )


def _uploads(values: _Values) -> UploadStats:
    by_result = {result: values.total("uploads", result) for result in UPLOAD_RESULTS}
    return UploadStats(**by_result, num_bytes=values.total("upload_bytes"))


def _variant(resident: Resident, values: _Values) -> VariantStats:
    label = variant_label(resident.tenant, resident.name)
    return VariantStats(
        tenant=resident.tenant,
        name=resident.name,
        version=resident.version,
        digest=f"sha256:{resident.digest}",
        device_bytes=resident.device_bytes,
        level=resident.state.level,
        pinned=resident.state.is_pinned,
        num_requests=resident.state.num_requests,
        finished=values.total("variant_requests", label),
        tokens=values.total("variant_tokens", label),
    )
