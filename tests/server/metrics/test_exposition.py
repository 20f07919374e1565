"""Scrapes of a service with a registry: deleted variants, active versions and readiness."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deltastore.errors import RegistryUnavailable
from deltastore.registry import Registry
from deltastore.registry.variants import VariantDirectory, VariantSummary
from server.inline import LocalMetrics
from server.metrics import exposition
from server.metrics.aggregator import Aggregator
from server.metrics.exposition import compose, read_registry, variant_labels
from server.metrics.instruments import MAX_LABEL_VALUES
from server.metrics.metrics import EngineMetrics
from server.protocol.engine_client import EngineClient
from server.tenants.tenant import TenantLimits
from tests.deltastore.helpers.crash_storage import artifact, push
from tests.server.metrics.helpers.scrapes import Scrape, scrape


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "registry")


@pytest.fixture
def engine() -> EngineMetrics:
    return EngineMetrics()


@pytest.fixture
def aggregator(engine: EngineMetrics) -> Aggregator:
    aggregator = Aggregator()
    aggregator.started("engine")
    return aggregator


def scraped(aggregator: Aggregator, engine: EngineMetrics, registry: Registry) -> Scrape:
    aggregator.received("engine", engine.snapshot())
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
    async def main() -> None:
        metrics = LocalMetrics(EngineClient("test"))
        shared = metrics.shared_state(lambda tenant: TenantLimits())
        for number in range(MAX_LABEL_VALUES):
            metrics.engine.variant_label("default", f"v{number}")
        assert metrics.engine.variant_label("default", "new") == "other"
        push(registry, artifact(1), "v0")
        state = read_registry(registry, variant_labels(await shared.metrics()))
        assert state is not None
        await shared.forget_variants(tuple(state.deleted))
        assert metrics.engine.variant_label("default", "new") == "default/new"
        assert metrics.engine.variant_label("default", "v0") == "default/v0"

    asyncio.run(main())


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


class CountedRegistry(Registry):
    """A registry that keeps account of the variants whose records are read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read: list[tuple[str, str]] = []

    def _readable(self, tenant: str, name: str) -> VariantDirectory:
        self.read.append((tenant, name))
        return super()._readable(tenant, name)


def test_a_scrape_reads_a_bounded_number_of_variants_those_with_other_series_first_and_tenants_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exposition, "MAX_LABEL_VALUES", 4)
    registry = CountedRegistry(tmp_path / "registry")
    for number in range(6):
        push(registry, artifact(1), f"v{number}", tenant="greedy")
    for name in ("a", "z"):
        push(registry, artifact(1), name, tenant="honest")
    state = read_registry(registry, {"greedy/v4", "honest/z", "gone/x", "greedy/gone"})
    assert state is not None
    assert state.deleted == {"gone/x", "greedy/gone"}
    assert list(state.active) == ["greedy/v4", "honest/z", "greedy/v0", "honest/a"]
    assert len(registry.read) == 4


def test_a_scrape_shows_all_but_a_variant_that_cannot_be_read_and_nothing_if_several_cannot(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"v{number}" for number in range(6)]
    for name in names:
        push(registry, artifact(1), name)
    spoilt = {"v1"}
    summary = Registry.summary
    num_failed = 0

    def fail(self: Registry, tenant: str, name: str) -> VariantSummary:
        nonlocal num_failed
        if name in spoilt:
            num_failed += 1
            raise RegistryUnavailable(f"variants/{tenant}/{name}/1.json: Input/output error")
        return summary(self, tenant, name)

    monkeypatch.setattr(Registry, "summary", fail)
    state = read_registry(registry, ())
    assert state is not None
    assert list(state.active) == [f"default/{name}" for name in names if name != "v1"]
    assert "variants/default/v1/1.json: Input/output error" in caplog.text
    spoilt.update(names)
    num_failed = 0
    assert read_registry(registry, ()) is None
    assert num_failed < len(names)


def test_a_variant_without_an_active_version_has_no_gauge(registry: Registry) -> None:
    push(registry, artifact(1), "v", activate=False)
    state = read_registry(registry, {"default/v"})
    assert state is not None
    assert (state.active, state.deleted) == ({}, frozenset())
    assert b"peraxis_variant_active_version{" not in compose(Aggregator().merged(), state, is_ready=True)


def test_metrics_are_merged_and_rendered_without_torch() -> None:
    program = (
        "import sys, server.metrics.exposition, server.metrics.aggregator; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
