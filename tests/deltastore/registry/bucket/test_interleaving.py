"""Two servers on one bucket, deaths and lost replies: changes have one order, and none is half made."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.exceptions import GenericError
from obstore.store import MemoryStore

from deltastore.errors import (
    PublicNameTaken,
    RegistryUnavailable,
    UsageError,
    VariantNotFound,
    VariantQuarantined,
)
from deltastore.registry import Registry
from deltastore.registry.bucket import objects
from tests.deltastore.helpers.buckets import registry_in
from tests.deltastore.helpers.crash_storage import View, artifact, digest_of, push, view
from tests.deltastore.helpers.meanwhile import MEANWHILE, Change, by_digests

CALLS = ("put", "get", "head", "list", "list_with_delimiter", "delete")


def quarantine(registry: Registry, name: str) -> None:
    (record,) = [each for each in registry.variant("default", name).versions if each.digest == digest_of(1)]
    registry.quarantine(record, "a test broke it")


CHANGES: dict[str, Change] = {
    "publish": lambda registry: push(registry, artifact(9), "a"),
    "publish without activating": lambda registry: push(registry, artifact(8), "a", activate=False),
    "publish the same bytes again": lambda registry: push(registry, artifact(1), "a"),
    "publish a new variant": lambda registry: push(registry, artifact(7), "new"),
    "activate": lambda registry: registry.activate("default", "a", 1),
    "activate another": lambda registry: registry.activate("default", "a", 3),
    "delete a version": lambda registry: registry.delete("default", "a", 1),
    "delete a variant": lambda registry: registry.delete("default", "a"),
    "make public": lambda registry: registry.set_visibility("default", "a", "public"),
    "make private": lambda registry: registry.set_visibility("default", "b", "private"),
    "quarantine": lambda registry: quarantine(registry, "a"),
    "collect": lambda registry: registry.gc(),
}
ALL = CHANGES | MEANWHILE
LISTS: dict[str, Callable[[Registry], list[Any]]] = {
    "names": lambda registry: registry.names("default"),
    "summaries": lambda registry: registry.summaries("default", ["a", "b"]),
    "active records": lambda registry: registry.active_records("default", ["a", "b"]),
    "public records": lambda registry: registry.active_records("other", registry.public_names()),
    "variants": lambda registry: registry.variants(),
}
GROUPS = (
    (
        "publish",
        "publish without activating",
        "publish the same bytes again",
        "activate",
        "activate another",
        "delete a version",
        "delete a variant",
    ),
    ("publish", "publish the same bytes again", "delete a variant", "collect"),
    ("quarantine", "publish the same bytes again", "collect"),
    ("make public", "delete a variant"),
)
PAIRS = sorted({(one, other) for group in GROUPS for one in group for other in group})


class Calls:
    """Counts the calls of the store, and interrupts one of them."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.interrupt_at: int | None = None
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None
        self.was_interrupted = False

    def run(self, change: Change, registry: Registry, interrupt_at: int | None) -> str:
        """Make a change; return the kind of its refusal, or "" if it was made."""
        self.names.clear()
        self.interrupt_at, self.was_interrupted = interrupt_at, False
        try:
            return refusal(change, registry)
        finally:
            self.interrupt_at = None

    def call(self, name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        number = len(self.names)
        self.names.append(name)
        if number != self.interrupt_at:
            return function(*args, **options)
        self.was_interrupted = True
        self.before()
        result = function(*args, **options)
        self.after()
        return result


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    counted = Calls()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: counted.call(name, function, *args, **options)

    for name in CALLS:
        monkeypatch.setattr(obstore, name, counting(name, getattr(obstore, name)))
    # Marks are listed at every look.
    monkeypatch.setattr(objects, "MARKS_FRESH_S", -1.0)
    return counted


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Directories for machines of their own."""
    return (tmp_path / str(number) for number in itertools.count())


def refusal(change: Change, registry: Registry) -> str:
    try:
        change(registry)
    except (VariantNotFound, VariantQuarantined, UsageError, PublicNameTaken, ValueError) as error:
        return type(error).__name__
    return ""


def world(directory: Iterator[Path]) -> tuple[MemoryStore, Registry]:
    """Variant `a` has three versions, the public `b` the bytes of one of them, and one object is garbage."""
    store = MemoryStore()
    registry = registry_in(store, next(directory))
    for seed in (1, 2):
        push(registry, artifact(seed), "a")
    push(registry, artifact(3), "a", activate=False)
    push(registry, artifact(1), "b")
    registry.set_visibility("default", "b", "public")
    push(registry, artifact(5), "gone")
    registry.delete("default", "gone")
    return store, registry


def outcome(directory: Iterator[Path], *names: str) -> tuple[View, list[str]]:
    """Return what users see after changes one after the other, and the refusal of each."""
    _, registry = world(directory)
    refusals = [refusal(ALL[name], registry) for name in names]
    return view(registry), refusals


def assert_whole(registry: Registry) -> None:
    assert registry.check().findings == ()
    before = view(registry)
    registry.gc()
    assert view(registry) == before
    report = registry.check()
    assert report.findings == ()
    assert all("quarantined" in note.problem for note in report.notes)


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_two_changes_at_once_are_as_one_after_the_other(
    one: str, other: str, calls: Calls, directory: Iterator[Path]
) -> None:
    assert_in_one_order(one, other, calls, directory)


@pytest.mark.parametrize("other", MEANWHILE)
def test_a_publisher_that_was_suspended_while_versions_came_and_went_publishes_once(
    other: str, calls: Calls, directory: Iterator[Path]
) -> None:
    assert_in_one_order("publish", other, calls, directory, by_digests)


def assert_in_one_order(
    one: str,
    other: str,
    calls: Calls,
    directory: Iterator[Path],
    shown: Callable[[View], View] = lambda seen: seen,
) -> None:
    first, (refused, others) = outcome(directory, one, other)
    second, (others_first, refused_then) = outcome(directory, other, one)
    allowed = [(shown(first), (refused, others)), (shown(second), (refused_then, others_first))]
    for number in itertools.count():
        store, _ = world(directory)
        late: list[str] = []
        # Neither has read anything, so that each reading of a file is a call.
        registry, elsewhere = (registry_in(store, next(directory)) for _ in range(2))
        calls.before = lambda late=late, elsewhere=elsewhere: late.append(refusal(ALL[other], elsewhere))  # type: ignore[misc]
        early = calls.run(ALL[one], registry, number)
        if not calls.was_interrupted:
            break
        found = shown(view(registry_in(store, next(directory))))
        assert (found, (early, late[0])) in allowed, f"{other} before call {number}: {calls.names[number]}"
        assert_whole(registry)
    assert number > 1


class Killed(BaseException):
    """Ends a server without a chance to clean up."""


@pytest.mark.parametrize("name", CHANGES)
def test_a_server_that_dies_leaves_a_change_made_or_not_made(
    name: str, calls: Calls, directory: Iterator[Path]
) -> None:
    def die() -> None:
        # The dead make no further calls.
        calls.interrupt_at = len(calls.names)
        raise Killed

    before, _ = outcome(directory)
    after, _ = outcome(directory, name)
    for number in itertools.count():
        store, registry = world(directory)
        calls.before = die
        with contextlib.suppress(Killed):
            calls.run(CHANGES[name], registry, number)
        if not calls.was_interrupted:
            break
        restarted = registry_in(store, next(directory))
        assert view(restarted) in (before, after), f"killed before call {number}: {calls.names[number]}"
        assert restarted.check().findings == ()
        refusal(CHANGES[name], restarted)
        assert view(restarted) == after
        restarted.gc()
        assert restarted.check().findings == ()


@pytest.mark.parametrize("name", CHANGES)
def test_a_lost_reply_leaves_a_change_made_or_not_made_and_the_next_try_makes_it(
    name: str, calls: Calls, directory: Iterator[Path]
) -> None:
    def lose() -> None:
        raise GenericError("the reply was lost")

    before, _ = outcome(directory)
    after, _ = outcome(directory, name)
    for number in itertools.count():
        store, registry = world(directory)
        calls.before, calls.after = lambda: None, lose
        try:
            calls.run(CHANGES[name], registry, number)
        except RegistryUnavailable:
            assert view(registry_in(store, next(directory))) in (before, after)
            refusal(CHANGES[name], registry)
        if not calls.was_interrupted:
            break
        assert view(registry_in(store, next(directory))) == after, f"{number}: {calls.names[number]}"
        assert registry.check().findings == ()


@pytest.mark.parametrize("name", LISTS)
def test_a_list_while_the_bucket_fails_is_whole_or_refused(
    name: str, calls: Calls, directory: Iterator[Path]
) -> None:
    def fail() -> None:
        raise GenericError("503 Slow Down")

    store, registry = world(directory)
    whole = LISTS[name](registry)
    for number in itertools.count():
        found: list[list[Any]] = []
        calls.before = fail
        with contextlib.suppress(RegistryUnavailable):
            calls.run(
                lambda registry, found=found: found.append(LISTS[name](registry)),  # type: ignore[misc]
                registry_in(store, next(directory)),
                number,
            )
        assert found in ([], [whole]), f"call {number}: {calls.names[number]}"
        if not calls.was_interrupted:
            break
    assert found == [whole]
    assert number > 0
