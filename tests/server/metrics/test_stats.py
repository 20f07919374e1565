"""Statistics are the gauges and totals of a snapshot, with the deltas in memory."""

from __future__ import annotations

from server.metrics.aggregator import stats_of
from server.metrics.instruments import Snapshot
from server.metrics.metrics import EngineMetrics, FrontendMetrics
from server.protocol.messages import DeltaState, Resident

RESIDENT = Resident("acme", "math", 3, "d" * 64, 1000, DeltaState("device", True, 2))


class BothMetrics:
    """The metrics of the engine and of HTTP."""

    def __init__(self) -> None:
        self.engine = EngineMetrics()
        self.frontend = FrontendMetrics()


def snapshot(metrics: BothMetrics) -> Snapshot:
    """Return the metrics of engine and HTTP in one snapshot; those that both count, from the engine."""
    engine, frontend = metrics.engine.snapshot(), metrics.frontend.snapshot()
    names = {family.name for family in engine.families}
    return Snapshot((*engine.families, *(each for each in frontend.families if each.name not in names)))


def test_values_are_those_of_the_snapshot() -> None:
    metrics = BothMetrics()
    metrics.engine.num_requests_running.set(3)
    metrics.engine.num_requests_waiting.set(2)
    metrics.engine.num_requests_waiting_by_reason.labels(reason="variant_load").set(1)
    metrics.engine.slots.set(8)
    metrics.engine.kv_cache_usage_ratio.set(0.25)
    metrics.engine.device_memory_bytes.labels(kind="kv").set(77)
    metrics.frontend.uploads_total.labels(result="created").inc(5)
    stats = stats_of(snapshot(metrics), [RESIDENT], 1e9)
    assert (stats.requests.running, stats.requests.waiting, stats.requests.waiting_for_load) == (3, 2, 1)
    assert (stats.engine.slots, stats.engine.kv_cache_usage, stats.uploads.created) == (8, 0.25, 5)
    assert stats.engine.device_memory_bytes == {"base": 0, "slots": 0, "kv": 77, "other": 0}
    [variant] = stats.variants
    assert (variant.tenant, variant.name, variant.version, variant.level) == ("acme", "math", 3, "device")
    assert (variant.digest, variant.pinned, variant.num_requests) == (f"sha256:{'d' * 64}", True, 2)
    assert stats.at == 1e9


def test_totals_are_those_of_the_server_and_of_each_variant() -> None:
    metrics = BothMetrics()
    metrics.engine.generation_tokens_total.inc(20)
    metrics.engine.prompt_tokens_total.inc(4)
    metrics.engine.variant_tokens_total.labels("acme/math", "generation").inc(6)
    metrics.engine.variant_tokens_total.labels("acme/math", "prompt").inc(2)
    metrics.engine.variant_tokens_total.labels("acme/other", "prompt").inc(9)
    metrics.engine.step_seconds.observe(0.5)
    metrics.engine.finished("acme", "math", "stop", 0.1)
    metrics.frontend.upload_bytes_total.inc(10)
    metrics.engine.batch_requests.observe(5)
    metrics.engine.batch_distinct_variants.observe(3)
    stats = stats_of(snapshot(metrics), [RESIDENT], 1e9)
    assert (stats.engine.step_requests, stats.engine.step_variants) == (5, 3)
    assert (stats.requests.generation_tokens, stats.requests.prompt_tokens) == (20, 4)
    assert (stats.requests.finished, stats.engine.steps, stats.uploads.num_bytes) == (1, 1, 10)
    assert (stats.variants[0].tokens, stats.variants[0].finished) == (8, 1)


def test_loads_and_cold_starts_have_counts_sums_and_buckets_by_source_and_stage() -> None:
    metrics = BothMetrics()
    for seconds in (0.02, 0.03, 500.0):
        metrics.engine.variant_load_seconds.labels("disk", "read").observe(seconds)
    metrics.engine.cold_start_seconds.labels("host").observe(0.7)
    metrics.engine.time_to_first_token_seconds.observe(0.1)
    stats = stats_of(snapshot(metrics), [], 1e9)
    loads = {(each.source, each.stage): each for each in stats.loads}
    assert set(loads) == {
        (source, stage)
        for source in ("store", "disk", "host")
        for stage in ("fetch", "read", "copy", "total")
    }
    read = loads["disk", "read"]
    assert (read.count, read.sum_s) == (3, 500.05)
    bounds = stats.duration_bounds_s
    assert len(read.buckets) == len(bounds) + 1
    assert (read.buckets[bounds.index(0.025)], read.buckets[bounds.index(0.05)], read.buckets[-1]) == (
        1,
        1,
        1,
    )
    assert loads["disk", "copy"].count == 0
    cold = {each.source: each for each in stats.cold_starts}
    assert (cold["host"].count, cold["host"].sum_s, cold["host"].stage) == (1, 0.7, None)
    assert cold["host"].buckets[bounds.index(1)] == 1
    assert (stats.first_token.count, stats.first_token.source) == (1, None)
