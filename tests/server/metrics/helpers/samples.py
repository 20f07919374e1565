"""The samples of one process's metrics, as a scrape of it alone would show them."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from server.metrics.exposition import render
from server.metrics.instruments import MetricSet


def samples_of(metrics: MetricSet) -> list[Sample]:
    text = render(metrics.snapshot()).decode()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def value_of(metrics: MetricSet, name: str, labels: Mapping[str, str] | None = None) -> float | None:
    """Return the value of the sample of a name with exactly these labels; None if there is none."""
    found = [
        each.value for each in samples_of(metrics) if each.name == name and each.labels == (labels or {})
    ]
    return found[0] if found else None
