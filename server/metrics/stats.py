"""Makes the statistics of a server from its merged metrics and from the deltas in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from server.metrics.instruments import PREFIX
from server.metrics.labels import UPLOAD_RESULTS, variant_label
from server.metrics.snapshot import Series, Snapshot
from server.protocol.messages import Resident
from server.protocol.stats import EngineStats, RequestStats, ServerStats, UploadStats, VariantStats


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
