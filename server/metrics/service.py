"""Metrics that exist once per service and are computed at each scrape: readiness, version and the registry's state."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from importlib.metadata import version

from deltastore.registry.objects import Usage
from deltastore.registry.variants import Variant
from server.metrics.definitions import PREFIX
from server.metrics.labels import MAX_LABEL_VALUES, variant_label
from server.metrics.snapshot import Family, Series


def service_families(
    usage: Usage, variants: Iterable[Variant], labels: Collection[str], *, is_ready: bool
) -> tuple[Family, ...]:
    """Return the gauges of the service.

    At most `MAX_LABEL_VALUES` variants have a gauge of their active version, those among `labels` first: the variants
    that other metrics show.
    """
    active = [
        Series((variant_label(variant.tenant, variant.name),), float(variant.active))
        for variant in variants
        if variant.active is not None
    ]
    active.sort(key=lambda series: series.labels[0] not in labels)
    return (
        Family(
            f"{PREFIX}variant_active_version",
            "Version that requests without a version get",
            "gauge",
            ("variant",),
            tuple(active[:MAX_LABEL_VALUES]),
        ),
        _gauge("registry_objects", "Artifacts in the registry", usage.num_objects),
        _gauge("registry_bytes", "Bytes of the registry's artifacts", usage.num_bytes),
        _gauge("registry_free_bytes", "Free bytes of the registry's file system", usage.free_bytes),
        _gauge("registry_quarantined", "Quarantined artifacts", usage.num_quarantined),
        _gauge("ready", "1 while requests are admitted", is_ready),
        Family(
            f"{PREFIX}build_info",
            "Always 1; the label is the version",
            "gauge",
            ("version",),
            (Series((version("peraxis"),), 1.0),),
        ),
    )


def _gauge(name: str, documentation: str, value: float) -> Family:
    return Family(PREFIX + name, documentation, "gauge", (), (Series((), float(value)),))
