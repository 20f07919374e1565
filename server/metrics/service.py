"""Metrics that exist once per service and are computed at each scrape: readiness, version and the registry's state."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from importlib.metadata import version
from typing import NamedTuple

from deltastore.errors import PeraxisError, RegistryUnavailable
from deltastore.registry import Registry
from deltastore.registry.reports import Usage
from deltastore.registry.variants import Variant
from server.metrics.definitions import PREFIX
from server.metrics.labels import MAX_LABEL_VALUES, variant_label
from server.metrics.snapshot import Family, Series

log = logging.getLogger(__name__)


class RegistryState(NamedTuple):
    """The part of a registry that a scrape shows, at one moment."""

    usage: Usage
    variants: tuple[Variant, ...]


def read_registry(registry: Registry) -> RegistryState | None:
    """Return the registry's state; None if it cannot be read. Reads files."""
    try:
        return RegistryState(registry.usage(), tuple(registry.variants()))
    except PeraxisError as error:
        # The watch of the registry's calls logs a volume that fails.
        if not isinstance(error, RegistryUnavailable):
            log.error("metrics without the registry: %s", error)
        return None


def service_families(
    state: RegistryState | None, labels: Collection[str], *, is_ready: bool
) -> tuple[Family, ...]:
    """Return the gauges of the service; without a registry's state, none of its contents.

    At most `MAX_LABEL_VALUES` variants have a gauge of their active version, those among `labels` first: the variants
    that other metrics show.
    """
    contents = () if state is None else (_active_versions(state.variants, labels), *_sizes(state.usage))
    return (
        *contents,
        _gauge("registry_up", "1 while the registry can be read", state is not None),
        _gauge("ready", "1 while requests are admitted", is_ready),
        Family(
            f"{PREFIX}build_info",
            "Always 1; the label is the version",
            "gauge",
            ("version",),
            (Series((version("peraxis"),), 1.0),),
        ),
    )


def _active_versions(variants: Iterable[Variant], labels: Collection[str]) -> Family:
    active = [
        Series((variant_label(variant.tenant, variant.name),), float(variant.active))
        for variant in variants
        if variant.active is not None
    ]
    active.sort(key=lambda series: series.labels[0] not in labels)
    return Family(
        f"{PREFIX}variant_active_version",
        "Version that requests without a version get",
        "gauge",
        ("variant",),
        tuple(active[:MAX_LABEL_VALUES]),
    )


def _sizes(usage: Usage) -> tuple[Family, ...]:
    return (
        _gauge("registry_objects", "Artifacts in the registry", usage.num_objects),
        _gauge("registry_bytes", "Bytes of the registry's artifacts", usage.num_bytes),
        _gauge("registry_quarantined", "Quarantined artifacts", usage.num_quarantined),
        *_free(usage.free_bytes),
    )


def _free(num_bytes: int | None) -> tuple[Family, ...]:
    # A bucket has no number of free bytes.
    if num_bytes is None:
        return ()
    return (_gauge("registry_free_bytes", "Free bytes of the registry's file system", num_bytes),)


def _gauge(name: str, documentation: str, value: float) -> Family:
    return Family(PREFIX + name, documentation, "gauge", (), (Series((), float(value)),))
