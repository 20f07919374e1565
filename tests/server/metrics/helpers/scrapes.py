"""A scrape of an aggregator and a registry, as an HTTP process and the supervisor answer it together."""

from __future__ import annotations

from typing import NamedTuple

from deltastore.registry import Registry
from server.metrics.aggregator import Aggregator
from server.metrics.exposition import compose, read_registry, variant_labels


class Scrape(NamedTuple):
    """The text of a scrape, and the labels of the variants that it has found deleted."""

    text: bytes
    deleted: frozenset[str]


def scrape(aggregator: Aggregator, registry: Registry, *, is_ready: bool) -> Scrape:
    snapshot = aggregator.merged()
    state = read_registry(registry, variant_labels(snapshot))
    deleted = frozenset() if state is None else state.deleted
    aggregator.forget_variants(deleted)
    return Scrape(compose(snapshot, state, is_ready=is_ready), deleted)
