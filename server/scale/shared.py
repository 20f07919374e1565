"""The one replica that has the state which all ingress replicas share, and the way to it.

The state is lost with it: Serve starts another replica, which counts limits from zero.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deltastore.errors import PeraxisError
from server.errors import QueueFull
from server.log import configure_logging
from server.metrics.aggregator import Aggregator
from server.metrics.instruments import Snapshot
from server.metrics.metrics import FrontendMetrics
from server.protocol.control import RemoteState, StateAnswer, StateCall, perform
from server.protocol.messages import ForgetVariants, Resident, encode
from server.registry_calls import RegistryCalls, open_registry, probe
from server.scale.engines import ReplicaMetrics
from server.scale.replica_link import Mailbox
from server.settings import Settings
from server.shared_state import COLLECT_S, SharedState
from server.tenants.keys import warn_without_keys
from server.tenants.limits import LimitsDirectory, with_default_limits

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

    async def perform(self, ingress: str, calls: list[StateCall]) -> list[StateAnswer]:
        """Do what an ingress calls, in order; return the answers."""
        self._heard(ingress)
        return [await perform(self._state, call) for call in calls]

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
            await self._state.metrics()
            now = time.monotonic()
            for replica in [name for name, at in self._heard_at.items() if now - at > SILENT_S]:
                log.warning("replica %s has ended", replica)
                del self._heard_at[replica]
                self._numbers.pop(replica, None)
                self._state.lost(replica)

    async def __del__(self) -> None:
        for task in self._watching:
            task.cancel()


REPORT_S = SILENT_S / 5

T = TypeVar("T")

# Calls that wait for the engines; others must not wait for them.
SLOW = frozenset({"metrics", "stats", "forget_variants"})


class RayStateLink:
    """The way to the shared state of the deployment of `SharedReplica`.

    Args:
        ingress: the full id of this ingress replica.
        shared: a handle of the deployment.
        metrics: those of this ingress.
    """

    def __init__(self, ingress: str, shared: DeploymentHandle[Any], metrics: FrontendMetrics) -> None:
        self.state = RemoteState(self._send)
        self._ingress = ingress
        self._shared = shared
        self._metrics = metrics
        self._numbers = itertools.count()
        self._outbox: Mailbox[StateCall] = Mailbox(self._perform)
        # A task that nothing refers to may be collected.
        self._slow: set[asyncio.Task[None]] = set()

    async def report(self) -> None:
        """Report this replica's metrics until cancelled."""
        while True:
            try:
                await self._call(self._shared.report.remote(self._report()))
            except PeraxisError as error:
                log.warning("metrics were not reported: %s", error)
            await asyncio.sleep(REPORT_S)

    def _send(self, call: StateCall) -> None:
        if call.method not in SLOW:
            self._outbox.put(call)
            return
        task = asyncio.create_task(self._perform([call]))
        self._slow.add(task)
        task.add_done_callback(self._slow.discard)

    async def _perform(self, calls: list[StateCall]) -> None:
        try:
            if calls[0].method in SLOW:
                await self._call(self._shared.report.remote(self._report()))
            answers: list[StateAnswer] = await self._call(self._shared.perform.remote(self._ingress, calls))
        except QueueFull as error:
            answers = [StateAnswer(call.call_id, error=error.public) for call in calls]
        for answer in answers:
            self.state.take(answer)

    async def _call(self, response: Awaitable[T]) -> T:
        try:
            return await response
        except (RayError, RayServeException) as error:
            log.warning("the shared state did not answer: %s", type(error).__name__)
            raise QueueFull(
                "the server's shared state is being started again: try again in a moment"
            ) from error

    def _report(self) -> IngressReport:
        return IngressReport(self._ingress, next(self._numbers), self._metrics.snapshot())
