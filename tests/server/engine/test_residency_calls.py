"""Calls to load and unload that a client repeats."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from deltastore.registry.records import VersionRecord
from server.deltas.residency import KEPT_S, MAX_CALLS, Prefetch, ResidencyCalls, Unload
from server.errors import LoadTimeout, QueueFull
from tests.server.helpers.residency import ResidencyHarness, running_residency

LOAD_TIMEOUT_S = 60.0


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[ResidencyHarness]:
    with running_residency(tmp_path) as running:
        yield running


def test_repeated_calls_cost_a_step_no_more_than_one_and_end_as_it_does(
    harness: ResidencyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = harness.publish("v", seed=1)
    harness.residency.forget(record.label)
    calls, asked = ResidencyCalls(harness.residency, LOAD_TIMEOUT_S), Counter[str]()
    load, unload = harness.residency.load, harness.residency.unload
    monkeypatch.setattr(harness.residency, "load", lambda *of: asked.update(["load"]) or load(*of))
    monkeypatch.setattr(harness.residency, "unload", lambda of: asked.update(["unload"]) or unload(of))
    loads: list[Future[None]] = [Future() for _ in range(50)]
    for future in loads:
        calls.add_prefetch(Prefetch(record, False, future))
    calls.serve(time.monotonic())
    harness.settle()
    calls.serve(time.monotonic())
    assert [future.result(0) for future in loads] == [None] * 50
    harness.residency.acquire(record.label)
    unloads: list[Future[None]] = [Future() for _ in range(50)]
    for future in unloads:
        calls.add_unload(Unload(record, future))
    calls.serve(time.monotonic())
    assert not any(future.done() for future in unloads)
    harness.residency.release(record.label)
    calls.serve(time.monotonic())
    assert [future.result(0) for future in unloads] == [None] * 50
    assert asked == {"load": 1, "unload": 3}


def test_a_repeated_call_fails_with_the_call_that_it_joined(harness: ResidencyHarness) -> None:
    record = harness.publish("v", seed=1)
    calls = ResidencyCalls(harness.residency, LOAD_TIMEOUT_S)
    first, later = Future[None](), Future[None]()
    calls.add_prefetch(Prefetch(record, True, first))
    calls.add_prefetch(Prefetch(record, True, later))
    calls.serve(time.monotonic() + 2 * LOAD_TIMEOUT_S)
    assert isinstance(later.exception(0), LoadTimeout)
    assert later.exception(0) is first.exception(0)


def test_one_tenants_calls_are_bounded_and_others_load_in_turn(
    harness: ResidencyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = harness.publish("v", seed=1)
    calls = ResidencyCalls(harness.residency, LOAD_TIMEOUT_S)
    begun: list[str] = []
    free = iter([True, True, True])

    def load(version: str, tenant: str, kept: set[str]) -> bool:
        if next(free, False):
            begun.append(tenant)
            return True
        return False

    monkeypatch.setattr(harness.residency, "load", load)

    def call(tenant: str, number: int) -> None:
        version = replace(record, tenant=tenant, name=f"v{number}", digest=f"{number:064x}")
        calls.add_prefetch(Prefetch(version, False, Future()))

    def call_until_refused() -> None:
        for number in range(MAX_CALLS):
            call("many", number)
            taken.append(number)

    taken: list[int] = []
    with pytest.raises(QueueFull, match="try again"):
        call_until_refused()
    assert MAX_CALLS // 3 < len(taken) < MAX_CALLS
    call("few", MAX_CALLS)
    calls.serve(time.monotonic())
    assert begun == ["many", "few", "many"]


def test_calls_to_load_take_no_slot_that_a_tenant_with_few_has_just_used(
    harness: ResidencyHarness,
) -> None:
    """However many of another tenant's versions are loaded; a tenant without any takes one of that one's."""
    calls, record = ResidencyCalls(harness.residency, LOAD_TIMEOUT_S), harness.publish("v", seed=1)

    def load(tenant: str, number: int, later_s: float = 0.0) -> str:
        return called(harness, calls, replace(record, tenant=tenant, name=f"v{number}"), later_s)

    def use(version: str) -> None:
        harness.residency.note_use(version, version.partition("/")[0])

    one = load("one", 0)
    use(one)
    for number in range(8):
        use(load("many", number))
        assert harness.residency.is_resident(one)
    other = load("other", 0)
    use(other)
    assert harness.residency.is_resident(one)
    for number in range(8):
        use(load("many", number))
        assert harness.residency.is_resident(one)
        assert harness.residency.is_resident(other)
    # The slot that was used longest ago is taken first, whichever tenant it belongs to.
    load("many", 9, 2 * KEPT_S)
    assert not harness.residency.is_resident(one)


def called(harness: ResidencyHarness, calls: ResidencyCalls, record: VersionRecord, later_s: float) -> str:
    """Call to load a version at a time from now; return its label once it is resident."""
    harness.published.add(record.label)
    answer = Future[None]()
    calls.add_prefetch(Prefetch(record, False, answer, called_at=time.monotonic() + later_s))
    for _ in range(3):
        calls.serve(time.monotonic() + later_s)
        harness.settle()
    assert answer.result(0) is None
    return record.label


@pytest.mark.parametrize("users", [("one",), ("one", "many"), ("many", "one", *["many"] * 20)])
def test_a_public_delta_is_kept_from_calls_of_the_tenant_that_had_it_loaded_first(
    harness: ResidencyHarness, users: tuple[str, ...]
) -> None:
    """Also when that tenant has used it since the other one did."""
    calls, record = ResidencyCalls(harness.residency, LOAD_TIMEOUT_S), harness.publish("public", seed=1)
    assert harness.residency.load(record.label, "many")
    harness.settle()
    for user in users:
        harness.residency.note_use(record.label, user)
    for number in range(6):
        own = called(harness, calls, replace(record, tenant="many", name=f"v{number}"), 0.0)
        harness.residency.note_use(own, "many")
        assert harness.residency.is_resident(record.label)
    # A minute after the other tenant's use it is as any other.
    for number in range(6, 9):
        called(harness, calls, replace(record, tenant="many", name=f"v{number}"), 2 * KEPT_S)
    assert not harness.residency.is_resident(record.label)


def test_a_delta_that_its_loader_alone_has_used_is_not_kept_from_its_calls(
    harness: ResidencyHarness,
) -> None:
    calls, record = ResidencyCalls(harness.residency, LOAD_TIMEOUT_S), harness.publish("public", seed=1)
    assert harness.residency.load(record.label, "many")
    harness.settle()
    harness.residency.note_use(record.label, "many")
    for number in range(6):
        called(harness, calls, replace(record, tenant="many", name=f"v{number}"), 0.0)
    assert not harness.residency.is_resident(record.label)
