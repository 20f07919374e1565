"""Promotions: what the entries of a variant remember of them, and those that rest on a version which is active."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from deltastore.errors import ActiveVersionChanged, VariantNotFound
from deltastore.registry import Registry
from deltastore.registry.variants import NUM_KEPT
from tests.deltastore.helpers.buckets import memory_registry
from tests.deltastore.helpers.crash_storage import artifact, push

OWNER, NAME = "default", "a"


@pytest.fixture(params=["directory", "bucket"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Registry:
    """A registry with three versions of a variant, in a directory and in a bucket."""
    made = Registry(tmp_path / "registry") if request.param == "directory" else memory_registry(tmp_path)
    for seed in (1, 2, 3):
        push(made, artifact(seed), NAME)
    return made


def versions_of(registry: Registry) -> list[int]:
    return [each.version for each in registry.promotions(OWNER, NAME)]


def test_promotions_are_remembered_with_their_time_and_key_the_newest_first(registry: Registry) -> None:
    begun = datetime.now(UTC) - timedelta(milliseconds=1)
    registry.activate(OWNER, NAME, 1, key_id="k1")
    registry.activate(OWNER, NAME, 2)
    newest, oldest = registry.promotions(OWNER, NAME)
    assert (newest.version, newest.promoted_by) == (2, None)
    assert (oldest.version, oldest.promoted_by) == (1, "k1")
    times = [datetime.fromisoformat(each.promoted_at) for each in (oldest, newest)]
    assert begun <= times[0] <= times[1] <= datetime.now(UTC)


def test_a_deletion_of_a_version_is_no_promotion(registry: Registry) -> None:
    registry.activate(OWNER, NAME, 1)
    registry.delete(OWNER, NAME, 2)
    registry.activate(OWNER, NAME, 3)
    assert versions_of(registry) == [3, 1]


def test_a_variant_that_is_published_anew_has_no_promotions_of_the_one_before(registry: Registry) -> None:
    registry.activate(OWNER, NAME, 1)
    registry.delete(OWNER, NAME)
    push(registry, artifact(4), NAME, activate=False)
    registry.activate(OWNER, NAME, 4)
    assert versions_of(registry) == [4]


def test_of_many_promotions_the_newest_are_remembered(registry: Registry) -> None:
    for number in range(NUM_KEPT + 6):
        registry.activate(OWNER, NAME, 1 + number % 2)
    found = versions_of(registry)
    assert found == [2, 1] * (NUM_KEPT // 2)


def test_entries_of_servers_that_stored_no_time_are_left_out_and_stay_valid(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "registry")
    for seed in (1, 2):
        push(registry, artifact(seed), NAME)
    registry.activate(OWNER, NAME, 1)
    (path,) = (tmp_path / "registry").glob(f"variants/{OWNER}/{NAME}/state-*.json")
    entry = json.loads(path.read_text())
    path.write_text(
        json.dumps({key: value for key, value in entry.items() if not key.startswith("promoted")})
    )
    assert registry.summary(OWNER, NAME).active == 1
    assert registry.promotions(OWNER, NAME) == []
    registry.activate(OWNER, NAME, 2)
    assert versions_of(registry) == [2]


def test_a_name_without_a_variant_has_no_promotions(registry: Registry) -> None:
    with pytest.raises(VariantNotFound):
        registry.promotions(OWNER, "absent")


def test_a_promotion_is_refused_where_another_version_is_active_than_its_caller_saw(
    registry: Registry,
) -> None:
    registry.activate(OWNER, NAME, 1, if_active=3)
    with pytest.raises(ActiveVersionChanged, match="version 1 is active now, and not 3"):
        registry.activate(OWNER, NAME, 2, if_active=3)
    with pytest.raises(ActiveVersionChanged, match="and not none"):
        registry.activate(OWNER, NAME, 2, if_active=0)
    assert registry.summary(OWNER, NAME).active == 1
    assert versions_of(registry) == [1]


def test_a_first_promotion_can_rest_on_there_being_no_active_version(registry: Registry) -> None:
    push(registry, artifact(9), "new", activate=False)
    with pytest.raises(ActiveVersionChanged, match="no version is active now"):
        registry.activate(OWNER, "new", 1, if_active=2)
    assert registry.activate(OWNER, "new", 1, if_active=0).version == 1


def test_a_version_that_is_published_meanwhile_is_seen(registry: Registry) -> None:
    push(registry, artifact(7), NAME)
    with pytest.raises(ActiveVersionChanged, match="version 4 is active now, and not 3"):
        registry.activate(OWNER, NAME, 1, if_active=3)
