"""Snapshots: the same values as prometheus_client's own, in a form that can be sent to another process."""

from __future__ import annotations

import math

import msgspec
import pytest
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from server.metrics.engine import EngineMetrics
from server.metrics.exposition import render
from server.metrics.snapshot import Snapshot, take_snapshot


@pytest.fixture
def metrics() -> EngineMetrics:
    """Metrics of every type, with and without labels, that have counted something."""
    metrics = EngineMetrics(CollectorRegistry())
    label = metrics.variant_label("t", 'v "quoted"\n')
    metrics.variant_tokens_total.labels(label, "prompt").inc(3)
    metrics.prompt_tokens_total.inc(2.5)
    metrics.slots.set(4)
    metrics.variants_resident.labels("host").set(-1)
    for seconds in (0.0, 0.003, 1.0, 1e6, math.inf):
        metrics.step_seconds.observe(seconds)
        metrics.cold_start_seconds.labels("disk").observe(seconds)
    return metrics


def test_a_rendered_snapshot_equals_prometheus_clients_text(metrics: EngineMetrics) -> None:
    assert render(take_snapshot(metrics.registry)) == generate_latest(metrics.registry)


def test_a_snapshot_survives_msgpack(metrics: EngineMetrics) -> None:
    snapshot = take_snapshot(metrics.registry)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot), type=Snapshot) == snapshot


def test_a_snapshot_does_not_change_when_its_process_counts_on(metrics: EngineMetrics) -> None:
    snapshot = take_snapshot(metrics.registry)
    before = msgspec.msgpack.encode(snapshot)
    metrics.prompt_tokens_total.inc()
    metrics.step_seconds.observe(1)
    assert msgspec.msgpack.encode(snapshot) == before


def test_process_metrics_are_part_of_a_snapshot() -> None:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    families = {family.name: family for family in take_snapshot(registry).families}
    assert families["process_cpu_seconds"].type == "counter"
    assert families["process_resident_memory_bytes"].series[0].value > 1 << 20
