"""The one replica that has the state which all ingress replicas share.

The state is lost with it: Serve starts another replica, which counts limits from zero.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from msgspec import Struct
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from server.errors import QueueFull
from server.log import configure_logging
from server.metrics.aggregator import Aggregator
from server.metrics.snapshot import Snapshot
from server.protocol.codec import encode
from server.protocol.messages import ForgetVariants, Resident
from server.protocol.shared_calls import AnyCall
from server.scale.engines import ReplicaMetrics
from server.settings import Settings
from server.shared_state import COLLECT_S, SharedState
from server.tenants.keys import warn_without_keys
from server.tenants.limits.default_limits import with_default_limits
from server.tenants.limits.directory import LimitsDirectory
from server.volume.calls import RegistryCalls
from server.volume.opening import open_registry
from server.volume.probe import probe

log = logging.getLogger(__name__)

# A replica that is not heard of for so long has ended: what it held is free, and its gauges are gone.
SILENT_S = 10.0


class IngressReport(Struct, frozen=True):
    """The metrics of an ingress replica; `number` grows from report to report."""

    ingress: str
    number: int
    snapshot: Snapshot


class SharedReplica:
    """The one replica of its deployment. Serve calls it on one event loop."""

    def __init__(self, settings: Settings, engines: DeploymentHandle[Any]) -> None:
        configure_logging("shared", settings)
        self._engines = engines
        registry = open_registry(settings)
        settings = with_default_limits(settings)
        calls = RegistryCalls(settings.registry, partial(probe, registry))
        limits = LimitsDirectory(settings.registry, settings.default_limits, calls)
        self._state = SharedState(self, limits.of)
        self._residents: list[Resident] = []
        self._heard_at: dict[str, float] = {}
        self._numbers: dict[str, int] = {}
        self._watching = [asyncio.create_task(self._sweep()), asyncio.create_task(calls.watch())]
        if settings.auth == "keys":
            warn_without_keys(settings.registry)
            self._watching.append(asyncio.create_task(limits.watch()))

    async def answer(self, ingress: str, calls: list[AnyCall]) -> list[Any]:
        """Do what an ingress asks, in order; return the answers, and the QueueFull of a call that raised it."""
        self._heard(ingress)
        answers: list[Any] = []
        for call in calls:
            try:
                answers.append(await self._state.answer(ingress, call))
            except QueueFull as error:
                answers.append(error)
        return answers

    async def report(self, report: IngressReport) -> None:
        """Take in the metrics of an ingress, which is a sign of life, too."""
        self._heard(report.ingress)
        # Reports may overtake each other.
        if report.number > self._numbers.get(report.ingress, -1):
            self._numbers[report.ingress] = report.number
            self._state.aggregator.received(report.ingress, report.snapshot)

    async def collect(self, aggregator: Aggregator) -> None:
        """Take in the metrics of the engines; an ingress reports its own."""
        found: list[ReplicaMetrics] = await self._ask_engines("metrics")
        for metrics in found:
            self._heard(metrics.replica)
            aggregator.received(metrics.replica, metrics.snapshot)
        self._residents = [resident for metrics in found for resident in metrics.residents]

    async def residents(self) -> Sequence[Resident]:
        """Return the deltas in memory. One in the memory of several replicas is listed once for each."""
        return self._residents

    async def forget_variants(self, labels: tuple[str, ...]) -> None:
        """Have the engines forget deleted variants."""
        await self._ask_engines("tell", [encode(ForgetVariants(labels))])

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
            self._state.aggregator.started(replica)
        self._heard_at[replica] = time.monotonic()

    async def _sweep(self) -> None:
        """Free what silent replicas held, until cancelled."""
        while True:
            await asyncio.sleep(SILENT_S / 2)
            await self._state.collect()
            now = time.monotonic()
            for replica in [name for name, at in self._heard_at.items() if now - at > SILENT_S]:
                log.warning("replica %s has ended", replica)
                del self._heard_at[replica]
                self._numbers.pop(replica, None)
                self._state.lost(replica)

    async def __del__(self) -> None:
        for task in self._watching:
            task.cancel()
