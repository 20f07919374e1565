"""Makes the statistics of a server from its merged metrics and from the deltas in memory. Collects nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from server.metrics.definitions import PREFIX
from server.metrics.labels import UPLOAD_RESULTS, variant_label
from server.metrics.snapshot import Series, Snapshot
from server.protocol.messages import Resident
from server.protocol.stats import EngineStats, RequestStats, ServerStats, UploadStats, VariantStats

# A longer interval would show the past as the present.
MAX_INTERVAL_S = 60.0


@dataclass(frozen=True, slots=True)
class _Values:
    """The series of a snapshot, by name without the prefix; no series of an absent family."""

    at: float
    series: Mapping[str, tuple[Series, ...]]

    def total(self, name: str, *labels: str) -> float:
        """Return the sum of a family's series whose first labels are these."""
        found = self.series.get(name, ())
        return sum(each.value for each in found if each.labels[: len(labels)] == labels)

    def count(self, name: str) -> float:
        """Return the number of a histogram's observations."""
        return sum(sum(each.counts) for each in self.series.get(name, ()))


class Statistics:
    """Makes one document after the other; rates are averages since the one before."""

    def __init__(self) -> None:
        self._last: _Values | None = None

    def make(
        self, snapshot: Snapshot, residents: Iterable[Resident], monotonic_s: float, at: float
    ) -> ServerStats:
        """Return the statistics of a moment.

        Args:
            snapshot: the metrics of the whole server.
            residents: the versions that want a delta in memory.
            monotonic_s: the time on a clock that never goes back.
            at: the time in seconds since 1970.
        """
        families = {family.name.removeprefix(PREFIX): family.series for family in snapshot.families}
        now, before = _Values(monotonic_s, families), self._last
        self._last = now
        if before is not None and not 0 < monotonic_s - before.at <= MAX_INTERVAL_S:
            before = None
        rates = _Rates(now, before)
        return ServerStats(
            at=at,
            interval_s=None if before is None else monotonic_s - before.at,
            requests=_requests(now, rates),
            engine=_engine(now, rates),
            uploads=_uploads(now, rates),
            variants=tuple(_variant(resident, rates) for resident in residents),
        )


@dataclass(frozen=True, slots=True)
class _Rates:
    """The growth per second between two moments; None without the first."""

    now: _Values
    before: _Values | None

    def of(self, name: str, *labels: str) -> float | None:
        before = self.before
        return (
            None
            if before is None
            else self._per_s(self.now.total(name, *labels), before.total(name, *labels))
        )

    def of_count(self, name: str) -> float | None:
        before = self.before
        return None if before is None else self._per_s(self.now.count(name), before.count(name))

    def _per_s(self, now: float, before: float) -> float | None:
        assert self.before is not None
        # A deleted variant's series are removed, so that its total falls.
        return max(0.0, now - before) / (self.now.at - self.before.at)


def _requests(now: _Values, rates: _Rates) -> RequestStats:
    return RequestStats(
        running=int(now.total("num_requests_running")),
        waiting=int(now.total("num_requests_waiting")),
        waiting_for_load=int(now.total("num_requests_waiting_by_reason", "variant_load")),
        finished_per_s=rates.of_count("e2e_request_latency_seconds"),
        prompt_tokens_per_s=rates.of("prompt_tokens"),
        generation_tokens_per_s=rates.of("generation_tokens"),
    )


def _engine(now: _Values, rates: _Rates) -> EngineStats:
    memory = {series.labels[0]: int(series.value) for series in now.series.get("device_memory_bytes", ())}
    return EngineStats(
        steps_per_s=rates.of_count("step_seconds"),
        preemptions=int(now.total("preemptions")),
        kv_cache_usage=now.total("kv_cache_usage_ratio"),
        device_memory_bytes=memory,
        slots=int(now.total("slots")),
        slots_in_use=int(now.total("slots_in_use")),
        slots_pinned=int(now.total("slots_pinned")),
        host_cache_bytes=int(now.total("host_cache_bytes")),
        host_cache_limit_bytes=int(now.total("host_cache_limit_bytes")),
    )


def _uploads(now: _Values, rates: _Rates) -> UploadStats:
    by_result = {result: int(now.total("uploads", result)) for result in UPLOAD_RESULTS}
    return UploadStats(
        **by_result, num_bytes=int(now.total("upload_bytes")), bytes_per_s=rates.of("upload_bytes")
    )


def _variant(resident: Resident, rates: _Rates) -> VariantStats:
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
        requests_per_s=rates.of("variant_requests", label),
        tokens_per_s=rates.of("variant_tokens", label),
    )
