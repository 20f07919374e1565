"""Labels of variants in the engine's metrics, and the names that code knows metrics by."""

from __future__ import annotations

import pytest

from server.metrics.instruments import FINISH_REASONS, LATENCY_BUCKETS, MAX_LABEL_VALUES, PREFIX, MetricSet
from server.metrics.metrics import VLLM_PREFIX, EngineMetrics, FrontendMetrics
from tests.server.metrics.helpers.samples import samples_of, value_of


@pytest.fixture
def metrics() -> EngineMetrics:
    return EngineMetrics()


@pytest.mark.parametrize("kind", [EngineMetrics, FrontendMetrics])
def test_an_attribute_has_its_metrics_name(kind: type[MetricSet]) -> None:
    metrics = kind()
    for family in metrics.snapshot().families:
        name = family.name.removeprefix(PREFIX)
        if name.startswith(VLLM_PREFIX):
            assert isinstance(metrics, EngineMetrics)
            assert hasattr(metrics.vllm, name.removeprefix(VLLM_PREFIX))
        else:
            assert hasattr(metrics, f"{name}_total" if family.type == "counter" else name)


def test_latency_buckets_include_the_slo_bounds() -> None:
    assert {0.005, 0.25, 0.5, 1, 2, 30} <= set(LATENCY_BUCKETS)


def test_the_label_of_a_variant_names_its_tenant(metrics: EngineMetrics) -> None:
    assert metrics.variant_label("acme", "instruct") == "acme/instruct"
    assert metrics.variant_label("acme", None) == "base"


def test_variants_beyond_the_bound_share_a_label(metrics: EngineMetrics) -> None:
    names = [f"v{number}" for number in range(MAX_LABEL_VALUES + 5)]
    labels = [metrics.variant_label("t", name) for name in names]
    assert labels[:MAX_LABEL_VALUES] == [f"t/{name}" for name in names[:MAX_LABEL_VALUES]]
    assert set(labels[MAX_LABEL_VALUES:]) == {"other"}
    assert metrics.variant_label("t", "v0") == "t/v0"


def test_a_tenant_with_many_variants_leaves_labels_to_others(metrics: EngineMetrics) -> None:
    greedy = {metrics.variant_label("greedy", f"v{number}") for number in range(5 * MAX_LABEL_VALUES)}
    honest = [metrics.variant_label("honest", f"v{number}") for number in range(20)]
    assert "other" in greedy
    assert honest == [f"honest/v{number}" for number in range(20)]


def test_a_label_has_a_series_as_soon_as_it_is_taken(metrics: EngineMetrics) -> None:
    label = {"variant": metrics.variant_label("t", "v"), "finish_reason": "error"}
    assert value_of(metrics, "peraxis_variant_requests_total", label) == 0


def test_deleted_variants_series_are_removed_and_their_labels_can_be_used_again(
    metrics: EngineMetrics,
) -> None:
    for number in range(MAX_LABEL_VALUES):
        label = metrics.variant_label("t", f"v{number}")
        metrics.variant_tokens_total.labels(label, "prompt").inc(3)
        metrics.variant_resident.labels(label, "host").set(1)
        for reason in FINISH_REASONS:
            metrics.variant_requests_total.labels(label, reason).inc()
    metrics.forget_variants(["t/v7", "t/v9"])
    shown = {sample.labels["variant"] for sample in samples_of(metrics) if "variant" in sample.labels}
    assert shown == {"base"} | {f"t/v{number}" for number in range(MAX_LABEL_VALUES) if number not in (7, 9)}
    kept = {"variant": "t/v8", "kind": "prompt"}
    assert value_of(metrics, "peraxis_variant_tokens_total", kept) == 3
    labels = [metrics.variant_label("t", f"new{number}") for number in range(3)]
    assert labels == ["t/new0", "t/new1", "other"]
