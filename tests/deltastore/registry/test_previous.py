"""The version that was active before the active one, to which a rollback returns."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltastore.registry import Registry
from tests.deltastore.helpers.buckets import memory_registry
from tests.deltastore.helpers.crash_storage import SteppedStorage, artifact, push


@pytest.fixture
def volume(tmp_path: Path) -> Registry:
    """A registry in a directory, for tests of its files."""
    return Registry(tmp_path / "registry", SteppedStorage())


@pytest.fixture(params=["directory", "bucket"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Registry:
    """A registry in a directory, and one in a bucket."""
    if request.param == "directory":
        return Registry(tmp_path / "registry", SteppedStorage())
    return memory_registry(tmp_path)


def test_the_previous_version_is_the_one_that_was_active_before(registry: Registry) -> None:
    def activity() -> tuple[int | None, int | None]:
        variant = registry.variant("default", "a")
        return variant.active, variant.previous

    push(registry, artifact(1), "a")
    assert activity() == (1, None)
    push(registry, artifact(2), "a", activate=False)
    push(registry, artifact(3), "a")
    assert activity() == (3, 1)
    registry.activate("default", "a", 2)
    assert activity() == (2, 3)
    # A promotion of the active version changes nothing.
    registry.activate("default", "a", 2)
    assert activity() == (2, 3)
    push(registry, artifact(4), "a")
    assert activity() == (4, 2)


def test_a_deleted_version_is_no_longer_the_previous_one(registry: Registry) -> None:
    for seed in (1, 2, 3):
        push(registry, artifact(seed), "a")
    registry.delete("default", "a", 2)
    assert registry.variant("default", "a").previous == 1
    registry.delete("default", "a", 1)
    assert registry.variant("default", "a").previous is None
    registry.delete("default", "a")
    push(registry, artifact(4), "a")
    assert registry.variant("default", "a").previous is None


def test_a_version_with_a_damaged_record_can_be_promoted_away_from(volume: Registry) -> None:
    for seed in (1, 2):
        push(volume, artifact(seed), "a")
    (volume.root / "variants" / "default" / "a" / "2.json").write_text("{")
    assert volume.activate("default", "a", 1).version == 1
    assert volume.resolve("default", "a").version == 1
