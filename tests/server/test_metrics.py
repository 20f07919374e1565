"""Names and labels of the metrics, at start and after variants were added and deleted."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from server.metrics import LATENCY_BUCKETS, MAX_VARIANT_LABELS, Metrics

EXPECTED = (
    "variant_load_seconds", "variant_load_bytes_total", "variant_load_failures_total",
    "cold_start_seconds", "variant_lookups_total", "slots", "slots_in_use", "slots_pinned",
    "variants_resident", "variant_resident", "variant_evictions_total", "host_cache_bytes",
    "host_cache_limit_bytes", "device_memory_bytes",
    "num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason",
    "request_queue_seconds", "time_to_first_token_seconds", "inter_token_latency_seconds",
    "e2e_request_latency_seconds", "prompt_tokens_total", "generation_tokens_total",
    "admission_rejections_total", "http_requests_total", "variant_requests_total",
    "variant_tokens_total", "variant_active_version", "tenant_requests_total", "tenant_tokens_total",
    "tenant_rejections_total", "step_seconds", "batch_requests", "batch_distinct_variants",
    "uploads_total", "upload_bytes_total", "registry_objects", "registry_bytes", "registry_free_bytes",
    "registry_quarantined", "ready", "build_info",
)  # fmt: skip


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> Metrics:
    return Metrics(registry)


@pytest.mark.parametrize("name", EXPECTED)
def test_every_metric_is_exposed_under_its_name_and_held_under_its_attribute(
    metrics: Metrics, name: str
) -> None:
    assert f"# HELP peraxis_{name} " in generate_latest(metrics.registry).decode()
    assert hasattr(metrics, name) or name == "build_info"


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("variant_load_seconds_count", {"source": "disk", "stage": "copy"}),
        ("variant_lookups_total", {"result": "device"}),
        ("variants_resident", {"level": "device"}),
        ("device_memory_bytes", {"kind": "kv"}),
        ("num_requests_waiting", {}),
        ("num_requests_waiting_by_reason", {"reason": "variant_load"}),
        ("admission_rejections_total", {"reason": "queue_full"}),
        ("variant_requests_total", {"variant": "base", "finish_reason": "stop"}),
        ("uploads_total", {"result": "rejected"}),
        ("ready", {}),
    ],
    ids=str,
)
def test_bounded_series_start_at_zero(
    metrics: Metrics, registry: CollectorRegistry, name: str, labels: dict[str, str]
) -> None:
    assert registry.get_sample_value(f"peraxis_{name}", labels) == 0


def test_the_version_is_a_label(metrics: Metrics, registry: CollectorRegistry) -> None:
    assert registry.get_sample_value("peraxis_build_info", {"version": version("peraxis")}) == 1


def test_latency_buckets_include_the_slo_bounds() -> None:
    assert {0.005, 0.25, 0.5, 1, 2, 30} <= set(LATENCY_BUCKETS)


def test_the_label_of_a_variant_names_its_tenant(metrics: Metrics) -> None:
    assert metrics.variant_label("acme", "instruct") == "acme/instruct"
    assert metrics.variant_label("acme", None) == "base"


def test_variants_beyond_the_bound_share_a_label(metrics: Metrics) -> None:
    names = [f"v{number}" for number in range(MAX_VARIANT_LABELS + 5)]
    labels = [metrics.variant_label("t", name) for name in names]
    assert labels[:MAX_VARIANT_LABELS] == [f"t/{name}" for name in names[:MAX_VARIANT_LABELS]]
    assert set(labels[MAX_VARIANT_LABELS:]) == {"other"}
    assert metrics.variant_label("t", "v0") == "t/v0"


def test_a_deleted_variants_series_are_removed_and_its_label_can_be_used_again(
    metrics: Metrics, registry: CollectorRegistry
) -> None:
    for number in range(MAX_VARIANT_LABELS):
        metrics.variant_tokens_total.labels(metrics.variant_label("t", f"v{number}"), "prompt").inc(3)
    metrics.forget_variant("t", "v7")
    gone, kept = ({"variant": f"t/v{number}", "kind": "prompt"} for number in (7, 8))
    assert registry.get_sample_value("peraxis_variant_tokens_total", gone) is None
    assert registry.get_sample_value("peraxis_variant_tokens_total", kept) == 3
    assert metrics.variant_label("t", "new") == "t/new"
    assert ("t", "v7") not in metrics.variant_labels()
