"""Snapshots: the same values as prometheus_client's own, in a form that can be sent to another process."""

from __future__ import annotations

import math
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from server.metrics.exposition import render
from server.metrics.instruments import LATENCY_BUCKETS, MetricSet, Snapshot
from server.metrics.metrics import EngineMetrics
from tests.server.metrics.helpers.samples import value_of


@pytest.fixture
def metrics() -> EngineMetrics:
    """Metrics of every type, with and without labels, that have counted something."""
    metrics = EngineMetrics()
    label = metrics.variant_label("t", 'v "quoted"\n')
    metrics.variant_tokens_total.labels(label, "prompt").inc(3)
    metrics.prompt_tokens_total.inc(2.5)
    metrics.slots.set(4)
    metrics.variants_resident.labels("host").set(-1)
    for seconds in (0.0, 0.003, 1.0, 1e6, math.inf):
        metrics.step_seconds.observe(seconds)
        metrics.cold_start_seconds.labels("disk").observe(seconds)
    return metrics


def test_a_rendered_snapshot_equals_prometheus_clients_text() -> None:
    """Counters, gauges and histograms, with and without labels, count as prometheus_client's do."""
    registry, metrics, label = CollectorRegistry(), MetricSet(), 'v "quoted"\n'
    theirs: list[Any] = [
        prometheus_client.Counter("peraxis_a", "A", registry=registry),
        prometheus_client.Counter("peraxis_b", "B", ("x", "y"), registry=registry),
        prometheus_client.Gauge("peraxis_c", "C", registry=registry),
        prometheus_client.Gauge("peraxis_d", "D", ("x",), registry=registry),
        prometheus_client.Histogram("peraxis_e", "E", buckets=(0.5, 1, 2), registry=registry),
        prometheus_client.Histogram("peraxis_f", "F", ("x",), buckets=LATENCY_BUCKETS, registry=registry),
    ]
    ours: list[Any] = [
        metrics.counter("a", "A"), metrics.labelled_counter("b", "B", x=(), y=()), metrics.gauge("c", "C"),
        metrics.labelled_gauge("d", "D", x=()), metrics.histogram("e", "E", (0.5, 1, 2)),
        metrics.labelled_histogram("f", "F", x=()),
    ]  # fmt: skip
    for a, b, c, d, e, f in (theirs, ours):
        a.inc(2.5)
        b.labels(label, "z").inc(3)
        b.labels(y="z", x=label).inc()
        b.labels("gone", "z").inc()
        b.remove("gone", "z")
        c.set(4)
        d.labels("host").set(-1)
        for seconds in (0.0, 0.003, 0.5, 1.0, 1.5, 1e6, math.inf):
            e.observe(seconds)
            f.labels("disk").observe(seconds)
    assert without_creation(render(metrics.snapshot())) == without_creation(generate_latest(registry))


def without_creation(text: bytes) -> list[str]:
    lines = text.decode().splitlines()
    # The time of creation follows; how many there are is compared.
    return [line.rpartition(" ")[0] if "_created" in line else line for line in lines]


def test_threads_that_count_at_once_lose_nothing() -> None:
    """As loader threads and the engine's do."""
    metrics = EngineMetrics()

    def count(number: int) -> None:
        for _ in range(2_000):
            metrics.prompt_tokens_total.inc()
            metrics.variant_load_seconds.labels(source="disk", stage=f"s{number % 2}").observe(1)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(count, range(8)))
    finally:
        sys.setswitchinterval(before)
    assert value_of(metrics, "peraxis_prompt_tokens_total") == 16_000
    name, labels = "peraxis_variant_load_seconds_count", {"source": "disk"}
    assert [value_of(metrics, name, {**labels, "stage": stage}) for stage in ("s0", "s1")] == [8_000, 8_000]


def test_a_snapshot_survives_msgpack(metrics: EngineMetrics) -> None:
    snapshot = metrics.snapshot()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot), type=Snapshot) == snapshot


def test_a_snapshot_does_not_change_when_its_process_counts_on(metrics: EngineMetrics) -> None:
    snapshot = metrics.snapshot()
    before = msgspec.msgpack.encode(snapshot)
    metrics.prompt_tokens_total.inc()
    metrics.step_seconds.observe(1)
    assert msgspec.msgpack.encode(snapshot) == before


def test_process_metrics_are_part_of_a_snapshot() -> None:
    families = {family.name: family for family in MetricSet(process=True).snapshot().families}
    assert families["process_cpu_seconds"].type == "counter"
    assert families["process_resident_memory_bytes"].series[0].value > 1 << 20
    assert not MetricSet().snapshot().families
