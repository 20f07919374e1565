"""Two servers without a lock: whatever one does between two steps of the other, both changes happen in one order."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from deltastore.errors import PublicNameTaken, UsageError, VariantNotFound, VariantQuarantined
from deltastore.registry import Registry
from tests.deltastore.helpers.crash_storage import (
    STEPS,
    SteppedStorage,
    View,
    artifact,
    push,
    stored,
    view,
)
from tests.deltastore.helpers.meanwhile import MEANWHILE, Change, by_digests

# These change the same variants, names or objects.
NAMES = (
    "publish",
    "publish without activating",
    "publish the same bytes again",
    "publish under a deleted name",
    "activate",
    "delete a version",
    "delete a variant",
    "make a variant public",
    "make a public variant private",
    "delete a public variant",
    "take over a public name",
    "heal",
    "collect",
)
CHANGES: dict[str, Change] = {
    **{name: STEPS[name] for name in NAMES},
    "activate another": lambda registry: registry.activate("default", "a", 3),
    "publish the bytes of a garbage object": lambda registry: push(registry, artifact(5), "a"),
    "quarantine a live object": lambda registry: registry.quarantine(stored(1), "a test broke it"),
    "publish the quarantined bytes": lambda registry: push(registry, artifact(1), "a"),
}
ALL = CHANGES | MEANWHILE
# Changes of one variant, one name or one object.
GROUPS = (
    ("publish", "publish the same bytes again", "activate", "activate another", "delete a variant"),
    ("make a public variant private", "delete a public variant"),
    ("collect", "publish the bytes of a garbage object"),
    ("collect", "quarantine a live object", "publish the quarantined bytes"),
)


class PausedStorage(SteppedStorage):
    """Storage that lets another server run before one step, counted from 0. Reads of names and files are steps too."""

    def __init__(self, pause_at: int, other: Callable[[], object]) -> None:
        super().__init__()
        self.pause_at = pause_at
        self.other = other
        self.is_paused = False

    def step(self, name: str) -> None:
        super().step(name)
        if len(self.calls) > self.pause_at and not self.is_paused:
            self.is_paused = True
            self.other()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[PausedStorage]:
    """While a storage is in this list, reads count as its steps."""
    watching: list[PausedStorage] = []
    listdir, read_bytes = os.listdir, Path.read_bytes

    def step(name: str) -> None:
        if watching and not watching[0].is_paused:
            watching[0].step(name)

    def stepped_listdir(path: Path) -> list[str]:
        step("listdir")
        return listdir(path)

    def stepped_read(path: Path) -> bytes:
        step("read")
        return read_bytes(path)

    monkeypatch.setattr(os, "listdir", stepped_listdir)
    monkeypatch.setattr(Path, "read_bytes", stepped_read)
    return watching


def refusal(change: Change, registry: Registry) -> str:
    """Make a change and return the kind of its refusal, or "" if it was made."""
    try:
        change(registry)
    except (VariantNotFound, VariantQuarantined, UsageError, PublicNameTaken) as error:
        return type(error).__name__
    return ""


def outcome(world: Path, root: Path, first: str, then: str) -> tuple[View, str, str]:
    """Return what users see after two changes one after the other, and the refusal of each."""
    shutil.copytree(world, root)
    registry = Registry(root, SteppedStorage())
    refusals = {name: refusal(ALL[name], registry) for name in (first, then)}
    seen = view(registry)
    shutil.rmtree(root)
    return seen, refusals[first], refusals[then]


def paused(
    world: Path, directory: Path, one: str, other: str, reads: list[PausedStorage]
) -> Iterator[tuple[Registry, tuple[str, str], str]]:
    """Make one change with the other before each of its steps in turn; yield the registry and their refusals."""
    for pause_at in itertools.count():
        root = Path(shutil.copytree(world, directory / str(pause_at)))
        others: list[str] = []
        storage = PausedStorage(pause_at, partial(note_refusal, others, ALL[other], root))
        registry = Registry(root, storage)
        storage.calls.clear()
        reads.append(storage)
        refused = refusal(ALL[one], registry)
        reads.clear()
        if not storage.is_paused:
            return
        yield (
            Registry(root, SteppedStorage()),
            (refused, others[0]),
            f"step {pause_at}: {storage.calls[pause_at]}",
        )
        shutil.rmtree(root)


def note_refusal(refusals: list[str], change: Change, root: Path) -> None:
    refusals.append(refusal(change, Registry(root, SteppedStorage())))


def assert_in_one_order(
    one: str,
    other: str,
    world: Path,
    scratch: Path,
    reads: list[PausedStorage],
    shown: Callable[[View], View] = lambda seen: seen,
) -> None:
    first, refused, others = outcome(world, scratch / "first", one, other)
    second, *refusals = outcome(world, scratch / "second", other, one)
    allowed = [(shown(first), (refused, others)), (shown(second), tuple(reversed(refusals)))]
    num_steps = 0
    for registry, found, step in paused(world, scratch, one, other, reads):
        assert (shown(view(registry)), found) in allowed, f"{other} before {step}"
        assert registry.check().findings == ()
        before = view(registry)
        registry.gc()
        assert view(registry) == before
        assert registry.check().findings == ()
        num_steps += 1
    assert num_steps > 2


@pytest.mark.parametrize(
    ("one", "other"), [(one, other) for group in GROUPS for one in group for other in group]
)
def test_two_changes_at_once_are_as_one_after_the_other(
    one: str, other: str, world: Path, scratch: Path, reads: list[PausedStorage]
) -> None:
    assert_in_one_order(one, other, world, scratch, reads)


@pytest.mark.parametrize("other", MEANWHILE)
@pytest.mark.parametrize(
    "one",
    [
        "publish",
        *(
            pytest.param(name, marks=pytest.mark.deploy)
            for name in (
                "publish the same bytes again",
                "activate",
                "delete a version",
                "make a variant public",
            )
        ),
    ],
)
def test_a_server_that_was_suspended_while_versions_came_and_went_makes_its_change_once(
    one: str, other: str, world: Path, scratch: Path, reads: list[PausedStorage]
) -> None:
    assert_in_one_order(one, other, world, scratch, reads, by_digests)


@pytest.mark.deploy
@pytest.mark.parametrize("other", CHANGES)
@pytest.mark.parametrize("one", CHANGES)
def test_any_two_changes_at_once_are_as_one_after_the_other(
    one: str, other: str, world: Path, scratch: Path, reads: list[PausedStorage]
) -> None:
    assert_in_one_order(one, other, world, scratch, reads)
