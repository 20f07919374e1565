"""The changes that other servers make while one is suspended in one of the variant `a`: versions come and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deltastore.registry import Registry
from tests.deltastore.helpers.crash_storage import View, artifact, push

Change = Callable[[Registry], object]


def in_turn(*changes: Change) -> Change:
    def change(registry: Registry) -> None:
        for each in changes:
            each(registry)

    return change


def published_and_deleted(seed: int) -> Change:
    def change(registry: Registry) -> None:
        record = push(registry, artifact(seed), "a", activate=False).record
        registry.delete("default", "a", record.version)

    return change


def published(seed: int) -> Change:
    return lambda registry: push(registry, artifact(seed), "a")


def delete_all(registry: Registry) -> None:
    registry.delete("default", "a")


# A number that the suspended one found free is assigned, deleted and removed.
MEANWHILE: dict[str, Change] = {
    "publish and delete": published_and_deleted(8),
    "publish and delete, and publish another": in_turn(published_and_deleted(8), published(5)),
    "publish and delete two, and collect": in_turn(
        published_and_deleted(8), published_and_deleted(5), Registry.gc
    ),
    "delete the variant and publish it anew": in_turn(delete_all, published(8)),
    "delete the variant, publish it anew and delete it": in_turn(
        delete_all, published_and_deleted(8), Registry.gc
    ),
}


def by_digests(seen: View) -> View:
    """Return a view with digests in the place of version numbers, of which a publication may skip some."""
    return {label: _by_digests(found) if isinstance(found, tuple) else found for label, found in seen.items()}


def _by_digests(found: tuple[Any, ...]) -> tuple[object, ...]:
    active, visibility, versions = found
    return dict(versions).get(active), visibility, [digest for _, digest in versions]
