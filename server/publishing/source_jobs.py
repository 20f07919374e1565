"""Publications that go on after their request was answered, as tasks of one HTTP process.

The shared state keeps theirs, so that every HTTP process can answer for them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec

from server.errors import Draining, QueueFull
from server.shared_state import MAX_RUNNING, PutSourceJob, SharedLink, SourceJob
from server.workers.pool import WorkerPool
from server.workers.worker_main import Limits

# Downloads at a time in one HTTP process. One tenant has at most half of them.
NUM_WORKERS = 4
# A hub's list of a repository's files is parsed in it.
LIMITS = Limits(memory_bytes=512 << 20, cpu_s=60.0)
MODULES = ("server.publishing.hub",)
# A hub may lie behind a proxy, whose URL may hold a password, and have a certificate of an authority of its own.
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
VARIABLES = (
    *PROXIES, *(name.lower() for name in PROXIES), "SSL_CERT_FILE", "SSL_CERT_DIR",
    "HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT", "HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK",
)  # fmt: skip
# Between two reports of the bytes that have come.
REPORT_S = 1.0


class Progress:
    """The state of a running job, which its work changes."""

    def __init__(self, job: SourceJob, shared: SharedLink) -> None:
        self.job = job
        self._shared = shared

    async def report(self, **changes: Any) -> None:
        """Change fields of the job's state and tell the server."""
        self.job = msgspec.structs.replace(self.job, **changes)
        await self._shared.ask(PutSourceJob(self.job))

    async def counted(self, pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """Yield the pieces, and report their bytes every `REPORT_S`."""
        num_bytes, next_at = 0, time.monotonic() + REPORT_S
        async for piece in pieces:
            num_bytes += len(piece)
            if time.monotonic() >= next_at:
                next_at = time.monotonic() + REPORT_S
                await self.report(num_bytes=num_bytes)
            yield piece
        await self.report(num_bytes=num_bytes)


# Returns the document of what was published.
Work = Callable[[Progress], Awaitable[dict[str, Any]]]


class SourceJobs:
    """The jobs of one HTTP process. Event loop only.

    Args:
        shared: the way to the shared state.
    """

    def __init__(self, shared: SharedLink) -> None:
        self.workers = WorkerPool(NUM_WORKERS, LIMITS, MODULES, variables=VARIABLES)
        self._shared = shared
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(
        self, job: SourceJob, work: Work, explain: Callable[[BaseException], dict[str, Any]]
    ) -> None:
        """Start a job.

        Args:
            job: its first state.
            work: publishes; its result ends the job as done, an error as failed.
            explain: returns the ``error`` of a failed job.

        Raises:
            QueueFull: the tenant has as many running jobs as it may.
        """
        if not await self._shared.ask(PutSourceJob(job)):
            raise QueueFull(
                f"{MAX_RUNNING} sources are being published: send this one when another has ended"
            )
        task = asyncio.create_task(self._run(Progress(job, self._shared), work, explain))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel the jobs, which remove what they wrote, and end the workers."""
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.workers.close()

    async def _run(
        self, progress: Progress, work: Work, explain: Callable[[BaseException], dict[str, Any]]
    ) -> None:
        try:
            [outcome] = await asyncio.gather(work(progress), return_exceptions=True)
        except asyncio.CancelledError:
            stopped = Draining("the server has shut down: send the request again")
            await progress.report(status="failed", error=explain(stopped))
            raise
        if isinstance(outcome, BaseException):
            await progress.report(status="failed", error=explain(outcome))
        else:
            await progress.report(status="done", result=outcome)
