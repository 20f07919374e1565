"""The state that all ingress replicas share, as one of them uses it. Event loop only."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Collection
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deltastore.errors import PeraxisError
from server.errors import QueueFull
from server.metrics.snapshot import Snapshot, take_snapshot
from server.protocol.adapters import AdapterChange, LoadedAdapter
from server.protocol.limits import (
    AddTokens,
    GiveBack,
    LimitAnswer,
    LimitCall,
    LimitQuestion,
)
from server.protocol.source_job import SourceJob
from server.protocol.stats import ServerStats
from server.scale.mailbox import Mailbox
from server.scale.shared import SILENT_S, IngressReport

log = logging.getLogger(__name__)

REPORT_S = SILENT_S / 5

T = TypeVar("T")


class SharedLink:
    """The deployment of `SharedState` as a `WholeServer`.

    Args:
        ingress: the full id of this ingress replica.
        shared: a handle of the deployment.
        metrics: those of this ingress.
    """

    def __init__(self, ingress: str, shared: DeploymentHandle[Any], metrics: CollectorRegistry) -> None:
        self._ingress = ingress
        self._shared = shared
        self._metrics = metrics
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[LimitAnswer]] = {}
        self._outbox: Mailbox[LimitCall] = Mailbox(self._count)

    async def report(self) -> None:
        """Report this replica's metrics until cancelled."""
        while True:
            try:
                await self._call(self._shared.report.remote(self._report()))
            except PeraxisError as error:
                log.warning("metrics were not reported: %s", error)
            await asyncio.sleep(REPORT_S)

    async def metrics(self) -> Snapshot:
        """Return the metrics of all replicas; raise QueueFull if nothing keeps them now."""
        return await self._call(self._shared.metrics.remote(self._report()))

    async def forget_variants(self, labels: Collection[str]) -> None:
        """Remove deleted variants from the metrics of all replicas; raise QueueFull if nothing keeps them now."""
        await self._call(self._shared.forget_variants.remote(list(labels)))

    async def stats(self) -> ServerStats:
        """Return the statistics of all replicas; raise QueueFull if nothing keeps them now."""
        return await self._call(self._shared.stats.remote(self._report()))

    async def put_source_job(self, job: SourceJob) -> bool:
        """Keep a state of a job of this replica; False for a new one of a tenant that may have no more."""
        return await self._call(self._shared.put_source_job.remote(self._ingress, job))

    async def find_source_job(self, tenant: str, name: str, job_id: str) -> SourceJob | None:
        """Return the last state of a tenant's job; None if there is none."""
        return await self._call(self._shared.find_source_job.remote(tenant, name, job_id))

    async def adapters(self, change: AdapterChange) -> tuple[LoadedAdapter, ...]:
        """Change the record of loaded adapters, and return it."""
        return await self._call(self._shared.adapters.remote(change))

    async def ask(self, call: LimitQuestion) -> LimitAnswer:
        """Return the ledger's answer to a call; raise QueueFull if nothing counts now."""
        answer = self._asked[call.call_id] = asyncio.get_running_loop().create_future()
        self._outbox.put(call)
        try:
            found: LimitAnswer = await answer
            return found
        finally:
            del self._asked[call.call_id]

    def tell(self, call: AddTokens | GiveBack) -> None:
        """Send a call without waiting for an answer, behind all that were asked before."""
        self._outbox.put(call)

    async def _count(self, calls: list[LimitCall]) -> None:
        try:
            answers: list[LimitAnswer] = await self._call(self._shared.count.remote(self._ingress, calls))
        except QueueFull as error:
            for call in calls:
                asked = self._asked.get(call.call_id)
                if asked is not None and not asked.done():
                    asked.set_exception(error)
            return
        for answer in answers:
            asked = self._asked.get(answer.call_id)
            # An answer to `tell`, or to what is not waited for any more, has no future.
            if asked is not None and not asked.done():
                asked.set_result(answer)

    async def _call(self, response: Awaitable[T]) -> T:
        try:
            return await response
        except (RayError, RayServeException) as error:
            log.warning("the shared state did not answer: %s", type(error).__name__)
            raise QueueFull(
                "the server's shared state is being started again: try again in a moment"
            ) from error

    def _report(self) -> IngressReport:
        return IngressReport(self._ingress, next(self._numbers), take_snapshot(self._metrics))
