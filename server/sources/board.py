"""The jobs that publish from sources, of all HTTP processes: the supervisor keeps their last states. Runs none.

A client may poll at another process than the one that runs its job, and a job may outlive the process that ran it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import msgspec

from server.protocol.source_job import SourceJob

# Bound on one tenant's jobs, on the whole server.
MAX_RUNNING = 4
# Jobs of one tenant, and of all, that are remembered after their end.
MAX_ENDED_OF_TENANT = 64
MAX_ENDED = 4096
INTERRUPTED = {
    "message": "the process that fetched the artifact has ended: send the request again",
    "type": "server_error",
    "param": None,
    "code": "internal_error",
}


@dataclass(slots=True)
class _Entry:
    """A job, and the process that runs it."""

    job: SourceJob
    process: Hashable


class SourceBoard:
    """The last state of each job of a server."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}  # by id, the oldest first

    def put(self, process: Hashable, job: SourceJob) -> bool:
        """Keep a state of a job that `process` runs. Return False for a new job of a tenant with `MAX_RUNNING` others.

        A state of a job that was forgotten is ignored.
        """
        if job.id not in self._entries:
            if job.status != "running":
                return True
            if self._num_running(job.tenant) >= MAX_RUNNING:
                return False
        self._entries[job.id] = _Entry(job, process)
        if job.status != "running":
            self._forget_oldest(job.tenant)
        return True

    def find(self, tenant: str, name: str, job_id: str) -> SourceJob | None:
        """Return the last state of a tenant's job for this variant; None if there is none or it was forgotten."""
        entry = self._entries.get(job_id)
        if entry is None or (entry.job.tenant, entry.job.name) != (tenant, name):
            return None
        return entry.job

    def lost(self, process: Hashable) -> None:
        """Fail the running jobs of a process that has ended."""
        for entry in self._entries.values():
            if entry.process == process and entry.job.status == "running":
                entry.job = msgspec.structs.replace(entry.job, status="failed", error=INTERRUPTED)

    def _num_running(self, tenant: str) -> int:
        jobs = (entry.job for entry in self._entries.values())
        return sum(job.tenant == tenant and job.status == "running" for job in jobs)

    def _forget_oldest(self, tenant: str) -> None:
        ended = [entry.job for entry in self._entries.values() if entry.job.status != "running"]
        theirs = [job for job in ended if job.tenant == tenant]
        surplus = (
            theirs[: max(0, len(theirs) - MAX_ENDED_OF_TENANT)] or ended[: max(0, len(ended) - MAX_ENDED)]
        )
        for job in surplus:
            del self._entries[job.id]
