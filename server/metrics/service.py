"""Metrics that exist once per service and are computed at each scrape: readiness, version and the registry's state."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version

from deltastore.errors import PeraxisError, RegistryError, RegistryUnavailable, VariantNotFound
from deltastore.registry import Registry
from deltastore.registry.reports import Usage
from server.metrics.instruments import PREFIX
from server.metrics.labels import MAX_LABEL_VALUES, variant_label
from server.metrics.snapshot import Family, Series

log = logging.getLogger(__name__)

# Variants that cannot be read before a scrape goes on without the registry.
MAX_FAILURES = 3


@dataclass(frozen=True, slots=True)
class RegistryState:
    """The part of a registry that a scrape shows, at one moment.

    Attributes:
        active: the active versions of variants by label.
        deleted: labels that were asked for, of variants that do not exist.
    """

    usage: Usage
    active: Mapping[str, int]
    deleted: frozenset[str] = frozenset()


def read_registry(
    registry: Registry, labels: Collection[str], usage: Usage | None = None
) -> RegistryState | None:
    """Return the registry's state; None if it cannot be read. Reads records of at most `MAX_LABEL_VALUES` variants.

    Args:
        registry: the registry.
        labels: of variants that other metrics show; their active versions come first.
        usage: a count that is new enough; None counts the registry's objects.
    """
    try:
        return _read(registry, labels, usage or registry.usage())
    except PeraxisError as error:
        # The watch of the registry's calls logs a volume that fails.
        if not isinstance(error, RegistryUnavailable):
            log.error("metrics without the registry: %s", error)
        return None


def service_families(state: RegistryState | None, *, is_ready: bool) -> tuple[Family, ...]:
    """Return the gauges of the service; without a registry's state, none of its contents."""
    contents = () if state is None else (_active_versions(state.active), *_sizes(state.usage))
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


def _read(registry: Registry, labels: Collection[str], usage: Usage) -> RegistryState:
    asked: dict[str, set[str]] = {}
    for label in sorted(labels):
        tenant, _, name = label.partition("/")
        asked.setdefault(tenant, set()).add(name)
    existing = {tenant: sorted(found.intersection(registry.names(tenant))) for tenant, found in asked.items()}
    deleted = set(labels) - {variant_label(*each) for each in _in_turns(existing)}
    # The others only as far as there is space, so that their names are listed only then.
    candidates = itertools.chain(_in_turns(existing), _others(registry, asked))
    active: dict[str, int] = {}
    num_failures = 0
    for tenant, name in itertools.islice(candidates, MAX_LABEL_VALUES):
        try:
            number = registry.summary(tenant, name).active
        except VariantNotFound:
            deleted.add(variant_label(tenant, name))
        except RegistryError as error:
            log.error("variant %s/%s is not shown: %s", tenant, name, error)
        except RegistryUnavailable as error:
            log.error("variant %s/%s is not shown: %s", tenant, name, error)
            # One file may be unreadable; more are the store itself, which 200 calls must not wait for.
            num_failures += 1
            if num_failures == MAX_FAILURES:
                raise
        else:
            if number is not None:
                active[variant_label(tenant, name)] = number
    return RegistryState(usage, active, frozenset(deleted).intersection(labels))


def _others(registry: Registry, asked: Mapping[str, Collection[str]]) -> Iterator[tuple[str, str]]:
    """Yield variants that were not asked for."""
    # Each tenant has one at least.
    listed = registry.tenants()[:MAX_LABEL_VALUES]
    yield from _in_turns(
        {
            tenant: [name for name in registry.names(tenant) if name not in asked.get(tenant, ())]
            for tenant in listed
        }
    )


def _in_turns(names_of: Mapping[str, Iterable[str]]) -> Iterator[tuple[str, str]]:
    """Yield tenants' variants, one of each tenant in turn."""
    by_tenant = [[(tenant, name) for name in found] for tenant, found in names_of.items()]
    for turn in itertools.zip_longest(*by_tenant):
        yield from (each for each in turn if each is not None)


def _active_versions(active: Mapping[str, int]) -> Family:
    return Family(
        f"{PREFIX}variant_active_version",
        "Version that requests without a version get",
        "gauge",
        ("variant",),
        tuple(Series((label,), float(number)) for label, number in active.items()),
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
