"""The state that all ingress replicas share: limits, adapters, source jobs and metrics. One replica of a deployment.

It is what the supervisor keeps in a server of one machine. Its state is lost with it: Serve starts another, which
counts limits from zero. Knows no HTTP and no request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import Any

from msgspec import Struct
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from server.log import configure_logging
from server.metrics.aggregator import Aggregator
from server.metrics.snapshot import Snapshot
from server.metrics.stats import Statistics
from server.protocol.adapters import AdapterChange, LoadedAdapter, LoadedAdapters
from server.protocol.codec import encode
from server.protocol.limits import LimitAnswer, LimitCall
from server.protocol.messages import ForgetVariants, Resident
from server.protocol.source_job import SourceJob
from server.protocol.stats import ServerStats
from server.scale.engines import ReplicaMetrics
from server.settings import Settings
from server.sources.board import SourceBoard
from server.tenants.keys import warn_without_keys
from server.tenants.limits.default_limits import with_default_limits
from server.tenants.limits.directory import LimitsDirectory
from server.tenants.limits.ledger import Ledger
from server.volume.calls import RegistryCalls
from server.volume.opening import open_registry
from server.volume.probe import probe

log = logging.getLogger(__name__)

# A replica that is not heard of for so long has ended: what it held is free, and its gauges are gone.
SILENT_S = 10.0
# An engine that has not answered by then counts with its last snapshot.
COLLECT_S = 2.0


class IngressReport(Struct, frozen=True):
    """The metrics of an ingress replica; `number` grows from report to report."""

    ingress: str
    number: int
    snapshot: Snapshot


class SharedState:
    """The one replica of its deployment. Serve calls it on one event loop."""

    def __init__(self, settings: Settings, engines: DeploymentHandle[Any]) -> None:
        configure_logging("shared", settings)
        self._engines = engines
        registry = open_registry(settings)
        settings = with_default_limits(settings)
        self._calls = RegistryCalls(settings.registry, partial(probe, registry))
        self._limits = LimitsDirectory(settings.registry, settings.default_limits, self._calls)
        self._ledger = Ledger(self._limits.of)
        self._adapters = LoadedAdapters()
        self._board = SourceBoard()
        self._aggregator = Aggregator()
        self._statistics = Statistics()
        self._heard_at: dict[str, float] = {}
        self._numbers: dict[str, int] = {}
        # One collection at a time: an older snapshot must not follow a newer one.
        self._lock = asyncio.Lock()
        self._watching = [asyncio.create_task(self._sweep()), asyncio.create_task(self._calls.watch())]
        if settings.auth == "keys":
            warn_without_keys(settings.registry)
            self._watching.append(asyncio.create_task(self._limits.watch()))

    async def count(self, ingress: str, calls: list[LimitCall]) -> list[LimitAnswer]:
        """Do what an ingress asks of the ledger, in order; return the answers to the calls that have one."""
        self._heard(ingress)
        answers = [await self._ledger.answer(ingress, call) for call in calls]
        return [answer for answer in answers if answer is not None]

    async def report(self, report: IngressReport) -> None:
        """Take in the metrics of an ingress, which is a sign of life, too."""
        self._heard(report.ingress)
        # Reports may overtake each other.
        if report.number > self._numbers.get(report.ingress, -1):
            self._numbers[report.ingress] = report.number
            self._aggregator.received(report.ingress, report.snapshot)

    async def metrics(self, report: IngressReport) -> Snapshot:
        """Return the metrics of all replicas together."""
        await self.report(report)
        async with self._lock:
            await self._collect()
            return self._aggregator.merged()

    async def forget_variants(self, labels: list[str]) -> None:
        """Remove deleted variants from the metrics of all replicas."""
        self._aggregator.forget_variants(frozenset(labels))
        await self._ask_engines("tell", [encode(ForgetVariants(tuple(labels)))])

    async def stats(self, report: IngressReport) -> ServerStats:
        """Return the statistics of all replicas. A delta in the memory of several is listed once for each."""
        await self.report(report)
        async with self._lock:
            residents = await self._collect()
            merged = self._aggregator.merged()
        return self._statistics.make(merged, residents, time.monotonic(), time.time())

    async def put_source_job(self, ingress: str, job: SourceJob) -> bool:
        """Keep a state of a job that an ingress runs; False for a new one of a tenant that may have no more."""
        self._heard(ingress)
        return self._board.put(ingress, job)

    async def find_source_job(self, tenant: str, name: str, job_id: str) -> SourceJob | None:
        """Return the last state of a tenant's job; None if there is none."""
        return self._board.find(tenant, name, job_id)

    async def adapters(self, change: AdapterChange) -> tuple[LoadedAdapter, ...]:
        """Change the record of loaded adapters, and return it."""
        return self._adapters.apply(change)

    async def _collect(self) -> list[Resident]:
        """Take in the metrics of the engines, and return the deltas in their memory."""
        found: list[ReplicaMetrics] = await self._ask_engines("metrics")
        for metrics in found:
            self._heard(metrics.replica)
            self._aggregator.received(metrics.replica, metrics.snapshot)
        return [resident for metrics in found for resident in metrics.residents]

    async def _ask_engines(self, method: str, *arguments: object) -> list[Any]:
        try:
            broadcast = self._engines.broadcast(method, *arguments)
            results = await broadcast.results_async(timeout_s=COLLECT_S, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError) as error:
            log.warning("no engine answered %r: %s", method, error)
            return []
        return [result for result in results if not isinstance(result, BaseException)]

    def _heard(self, replica: str) -> None:
        if replica not in self._heard_at:
            self._aggregator.started(replica)
        self._heard_at[replica] = time.monotonic()

    async def _sweep(self) -> None:
        """Free what silent replicas held, until cancelled."""
        while True:
            await asyncio.sleep(SILENT_S / 2)
            async with self._lock:
                await self._collect()
            now = time.monotonic()
            for replica in [name for name, at in self._heard_at.items() if now - at > SILENT_S]:
                log.warning("replica %s has ended", replica)
                del self._heard_at[replica]
                self._numbers.pop(replica, None)
                self._aggregator.ended(replica)
                self._ledger.free(replica)
                self._board.lost(replica)

    async def __del__(self) -> None:
        for task in self._watching:
            task.cancel()
