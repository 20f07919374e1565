"""The board of jobs: bounded per tenant, and honest about jobs whose process died."""

from __future__ import annotations

import msgspec
import pytest

from server import shared_state
from server.shared_state import MAX_RUNNING, SourceBoard, SourceJob


def job(number: int, tenant: str = "acme") -> SourceJob:
    return SourceJob(id=f"{tenant}-{number}", tenant=tenant, name="math", source="hf://a/b@c", started_at=1.0)


def done(running: SourceJob) -> SourceJob:
    return msgspec.structs.replace(running, status="done", result={"version": 1})


def test_a_tenant_has_a_bounded_number_of_running_jobs() -> None:
    jobs = SourceBoard()
    assert [jobs.put("http-1", job(number)) for number in range(MAX_RUNNING + 1)] == [True] * MAX_RUNNING + [
        False
    ]
    assert jobs.put("http-2", job(0, "other"))
    assert jobs.put("http-1", done(job(0)))
    assert jobs.put("http-1", job(MAX_RUNNING))


def test_a_job_is_found_by_its_tenant_and_name_alone() -> None:
    jobs = SourceBoard()
    jobs.put("http-1", job(1))
    assert jobs.find("acme", "math", "acme-1") == job(1)
    for other in (("evil", "math", "acme-1"), ("acme", "other", "acme-1"), ("acme", "math", "acme-2")):
        assert jobs.find(*other) is None


def test_the_jobs_of_a_dead_process_have_failed() -> None:
    jobs = SourceBoard()
    jobs.put("http-1", job(1))
    jobs.put("http-1", job(2))
    jobs.put("http-1", done(job(2)))
    jobs.put("http-2", job(3))
    jobs.lost("http-1")
    states = [jobs.find("acme", "math", f"acme-{number}") for number in (1, 2, 3)]
    assert [each.status for each in states if each] == ["failed", "done", "running"]
    assert states[0] is not None
    assert states[0].error is not None
    assert states[0].error["code"] == "internal_error"
    assert jobs.put("http-2", job(4))


def test_ended_jobs_are_forgotten_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_state, "MAX_ENDED_OF_TENANT", 2)
    jobs = SourceBoard()
    for number in range(4):
        jobs.put("http-1", job(number))
        jobs.put("http-1", done(job(number)))
    assert [jobs.find("acme", "math", f"acme-{number}") is None for number in range(4)] == [
        True,
        True,
        False,
        False,
    ]


def test_the_jobs_of_all_tenants_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_state, "MAX_ENDED", 3)
    jobs = SourceBoard()
    for number in range(5):
        jobs.put("http-1", job(0, f"tenant-{number}"))
        jobs.put("http-1", done(job(0, f"tenant-{number}")))
    found = [jobs.find(f"tenant-{number}", "math", f"tenant-{number}-0") is not None for number in range(5)]
    assert found == [False, False, True, True, True]
