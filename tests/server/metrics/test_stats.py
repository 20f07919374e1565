"""Statistics: values of the newest snapshot, rates between two, and no rate where there is none."""

from __future__ import annotations

import pytest

from server.metrics.local import LocalMetrics
from server.metrics.snapshot import Snapshot, take_snapshot
from server.metrics.stats import MAX_INTERVAL_S, Statistics
from server.protocol.messages import DeltaState, Resident

RESIDENT = Resident("acme", "math", 3, "d" * 64, 1000, DeltaState("device", True, 2))


def snapshot(metrics: LocalMetrics) -> Snapshot:
    """Return the metrics of engine and HTTP in one snapshot; those that both count, from the engine."""
    engine, frontend = take_snapshot(metrics.engine.registry), take_snapshot(metrics.frontend.registry)
    names = {family.name for family in engine.families}
    return Snapshot((*engine.families, *(each for each in frontend.families if each.name not in names)))


def test_values_are_those_of_the_snapshot() -> None:
    metrics = LocalMetrics()
    metrics.engine.num_requests_running.set(3)
    metrics.engine.num_requests_waiting.set(2)
    metrics.engine.num_requests_waiting_by_reason.labels(reason="variant_load").set(1)
    metrics.engine.slots.set(8)
    metrics.engine.kv_cache_usage_ratio.set(0.25)
    metrics.engine.device_memory_bytes.labels(kind="kv").set(77)
    metrics.frontend.uploads_total.labels(result="created").inc(5)
    stats = Statistics().make(snapshot(metrics), [RESIDENT], 10.0, 1e9)
    assert (stats.requests.running, stats.requests.waiting, stats.requests.waiting_for_load) == (3, 2, 1)
    assert (stats.engine.slots, stats.engine.kv_cache_usage, stats.uploads.created) == (8, 0.25, 5)
    assert stats.engine.device_memory_bytes == {"base": 0, "slots": 0, "kv": 77, "other": 0}
    [variant] = stats.variants
    assert (variant.tenant, variant.name, variant.version, variant.level) == ("acme", "math", 3, "device")
    assert (variant.digest, variant.pinned, variant.num_requests) == (f"sha256:{'d' * 64}", True, 2)
    assert stats.at == 1e9


def test_rates_are_averages_between_two_snapshots() -> None:
    metrics, statistics = LocalMetrics(), Statistics()
    metrics.engine.generation_tokens_total.inc(1000)
    first = statistics.make(snapshot(metrics), [RESIDENT], 10.0, 1e9)
    assert (
        first.interval_s is first.requests.generation_tokens_per_s is first.variants[0].tokens_per_s is None
    )
    metrics.engine.generation_tokens_total.inc(20)
    metrics.engine.prompt_tokens_total.inc(4)
    metrics.engine.variant_tokens_total.labels("acme/math", "generation").inc(6)
    metrics.engine.variant_tokens_total.labels("acme/math", "prompt").inc(2)
    metrics.engine.variant_tokens_total.labels("acme/other", "prompt").inc(9)
    metrics.engine.step_seconds.observe(0.5)
    metrics.engine.finished("acme", "math", "stop", 0.1)
    metrics.frontend.upload_bytes_total.inc(10)
    second = statistics.make(snapshot(metrics), [RESIDENT], 12.0, 1e9)
    assert second.interval_s == 2.0
    assert (second.requests.generation_tokens_per_s, second.requests.prompt_tokens_per_s) == (10.0, 2.0)
    assert (second.requests.finished_per_s, second.engine.steps_per_s) == (0.5, 0.5)
    assert (second.variants[0].tokens_per_s, second.variants[0].requests_per_s) == (4.0, 0.5)
    assert (second.uploads.num_bytes, second.uploads.bytes_per_s) == (10, 5.0)


@pytest.mark.parametrize("later_s", [0.0, MAX_INTERVAL_S + 1])
def test_there_is_no_rate_over_no_time_or_a_long_one(later_s: float) -> None:
    metrics, statistics = LocalMetrics(), Statistics()
    statistics.make(snapshot(metrics), [], 10.0, 1e9)
    assert statistics.make(snapshot(metrics), [], 10.0 + later_s, 1e9).interval_s is None


def test_a_deleted_variant_makes_no_rate_negative() -> None:
    metrics, statistics = LocalMetrics(), Statistics()
    metrics.engine.variant_label("acme", "math")
    metrics.engine.variant_tokens_total.labels("acme/math", "generation").inc(6)
    statistics.make(snapshot(metrics), [RESIDENT], 10.0, 1e9)
    metrics.engine.variant_tokens_total.remove("acme/math", "generation")
    assert statistics.make(snapshot(metrics), [RESIDENT], 11.0, 1e9).variants[0].tokens_per_s == 0.0
