"""Scrapes of a service with a registry: deleted variants, active versions and readiness."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from deltastore.registry import Registry
from deltastore.registry.reports import Usage
from deltastore.registry.variants import Variant
from server.metrics.aggregator import Aggregator
from server.metrics.engine import EngineMetrics
from server.metrics.exposition import Scrape, scrape
from server.metrics.labels import MAX_LABEL_VALUES
from server.metrics.local import LocalMetrics
from server.metrics.service import RegistryState, service_families
from server.metrics.snapshot import take_snapshot
from tests.deltastore.helpers.crash_storage import artifact, push

NO_USAGE = Usage(0, 0, 0, 0)


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "registry")


@pytest.fixture
def engine() -> EngineMetrics:
    return EngineMetrics(CollectorRegistry())


@pytest.fixture
def aggregator(engine: EngineMetrics) -> Aggregator:
    aggregator = Aggregator()
    aggregator.started("engine")
    return aggregator


def scraped(aggregator: Aggregator, engine: EngineMetrics, registry: Registry) -> Scrape:
    aggregator.received("engine", take_snapshot(engine.registry))
    return scrape(aggregator, registry, is_ready=True)


def value(text: bytes, name: str, **labels: str) -> float | None:
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            if sample.name == f"peraxis_{name}" and sample.labels == labels:
                return sample.value
    return None


def test_a_deleted_variant_is_gone_although_the_engine_has_not_forgotten_it(
    aggregator: Aggregator, engine: EngineMetrics, registry: Registry
) -> None:
    for name in ("kept", "gone"):
        push(registry, artifact(1), name)
        label = engine.variant_label("default", name)
        engine.variant_tokens_total.labels(label, "prompt").inc(3)
        engine.variant_resident.labels(label, "device").set(1)
    assert scraped(aggregator, engine, registry).deleted == frozenset()
    registry.delete("default", "gone")
    for _ in range(2):
        text, deleted = scraped(aggregator, engine, registry)
        assert deleted == {"default/gone"}
        assert b"default/gone" not in text
        assert value(text, "variant_tokens_total", variant="default/kept", kind="prompt") == 3


def test_a_deleted_variant_is_gone_although_its_engine_has_died(
    aggregator: Aggregator, engine: EngineMetrics, registry: Registry
) -> None:
    push(registry, artifact(1), "gone")
    engine.variant_requests_total.labels(engine.variant_label("default", "gone"), "stop").inc()
    scraped(aggregator, engine, registry)
    aggregator.ended("engine")
    before = scrape(aggregator, registry, is_ready=False).text
    assert value(before, "variant_requests_total", variant="default/gone", finish_reason="stop") == 1
    registry.delete("default", "gone")
    assert b"default/gone" not in scrape(aggregator, registry, is_ready=False).text


def test_a_variant_that_only_took_a_label_gives_it_back(
    aggregator: Aggregator, engine: EngineMetrics, registry: Registry
) -> None:
    """As one that was loaded by an operator, evicted and deleted, without a request."""
    engine.variant_label("default", "never-asked")
    assert scraped(aggregator, engine, registry).deleted == {"default/never-asked"}


def test_in_one_process_a_scrape_gives_back_the_labels_of_deleted_variants(registry: Registry) -> None:
    metrics = LocalMetrics()
    for number in range(MAX_LABEL_VALUES):
        metrics.engine.variant_label("default", f"v{number}")
    assert metrics.engine.variant_label("default", "new") == "other"
    push(registry, artifact(1), "v0")
    metrics.scrape(registry, is_ready=True)
    assert metrics.engine.variant_label("default", "new") == "default/new"
    assert metrics.engine.variant_label("default", "v0") == "default/v0"


def test_the_registrys_state_and_readiness_are_those_at_the_scrape(
    aggregator: Aggregator, registry: Registry
) -> None:
    push(registry, artifact(1), "a")
    push(registry, artifact(2), "a")
    first = scrape(aggregator, registry, is_ready=False).text
    assert value(first, "variant_active_version", variant="default/a") == 2
    assert value(first, "registry_objects") == 2
    assert value(first, "ready") == 0
    registry.activate("default", "a", 1)
    second = scrape(aggregator, registry, is_ready=True).text
    assert value(second, "variant_active_version", variant="default/a") == 1
    assert value(second, "ready") == 1


def test_a_registry_that_cannot_be_read_is_told_and_all_other_series_stay(
    aggregator: Aggregator, engine: EngineMetrics, registry: Registry
) -> None:
    push(registry, artifact(1), "a")
    engine.variant_requests_total.labels(engine.variant_label("default", "a"), "stop").inc()
    assert value(scraped(aggregator, engine, registry).text, "registry_up") == 1
    away = registry.root.rename(registry.root.with_name("away"))
    text, deleted = scraped(aggregator, engine, registry)
    assert (value(text, "registry_up"), value(text, "registry_objects"), deleted) == (0, None, frozenset())
    assert value(text, "variant_requests_total", variant="default/a", finish_reason="stop") == 1
    away.rename(registry.root)
    assert value(scraped(aggregator, engine, registry).text, "registry_up") == 1


def test_active_versions_are_bounded_and_those_of_variants_with_other_series_come_first() -> None:
    variants = tuple(Variant("t", f"v{number}", (), 1) for number in range(MAX_LABEL_VALUES + 50))
    shown = f"t/v{MAX_LABEL_VALUES + 49}"
    families = service_families(RegistryState(NO_USAGE, variants), {shown}, is_ready=True)
    series = next(family for family in families if family.name == "peraxis_variant_active_version").series
    assert [one.labels for one in series[:2]] == [(shown,), ("t/v0",)]
    assert len(series) == MAX_LABEL_VALUES


def test_a_variant_without_an_active_version_has_no_gauge() -> None:
    families = service_families(RegistryState(NO_USAGE, (Variant("t", "v", (), None),)), (), is_ready=True)
    assert families[0].name == "peraxis_variant_active_version"
    assert not families[0].series


def test_metrics_are_merged_and_rendered_without_torch() -> None:
    program = "import sys, server.metrics.exposition, server.metrics.local; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
