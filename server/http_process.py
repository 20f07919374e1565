"""An HTTP process: `python -m server.http_process`, started by the supervisor with a configuration on standard input.

It accepts on the supervisor's listening sockets, and ends with its link to the supervisor. Imports no torch.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import socket
import sys
from collections.abc import Collection
from typing import Any

from msgspec import json
from prometheus_client import CollectorRegistry, ProcessCollector

# First, so that transformers is imported without torch.
import server.text.without_torch  # noqa: F401

# isort: split
from deltastore.errors import PeraxisError
from deltastore.memory import return_freed_memory
from server.api.service import Service
from server.app import serve
from server.control_link import ControlLink, http_process_end
from server.frontend.engine_client import EngineClient
from server.frontend.listen import inherited
from server.frontend.web_server import run_event_loop
from server.log import configure_logging
from server.metrics.frontend import FrontendMetrics
from server.metrics.snapshot import Snapshot, take_snapshot
from server.process_tree import die_with_parent
from server.protocol.adapters import AdapterChange, LoadedAdapter
from server.protocol.control import (
    Adapters,
    AdaptersWanted,
    CannotServe,
    EngineLost,
    EngineStarted,
    HttpProcessMessage,
    MetricsOfProcess,
    MetricsOfServer,
    MetricsOfServerWanted,
    MetricsWanted,
    Ping,
    Pong,
    PutSourceJob,
    Serving,
    SourceJobAnswer,
    SourceJobWanted,
    StatsAnswer,
    StatsWanted,
    SupervisorMessage,
    VariantsDeleted,
)
from server.protocol.limits import (
    AddTokens,
    GiveBack,
    LimitAnswer,
    LimitQuestion,
    LimitsUnknown,
    SeatRefused,
    SeatTaken,
    TokensAdded,
    TokensCounted,
    UploadGrown,
    UsageOfTenant,
)
from server.protocol.messages import EngineFacts
from server.protocol.processes import HttpProcessConfig, check_version
from server.protocol.source_job import SourceJob
from server.protocol.stats import ServerStats
from server.settings import Settings
from server.volume.opening import open_registry

# The event loop waits for the interpreter's lock while threads parse bodies and read the registry. Python's default of
# 5 ms each would hold up every stream.
SWITCH_S = 0.0005


def main() -> int:
    """Serve until SIGTERM. Return the exit code."""
    config = json.decode(sys.stdin.buffer.read(), type=HttpProcessConfig)
    die_with_parent(config.parent_id)
    check_version(config)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_S)
    # Bodies and replies of megabytes, which tenants size, would stay in the heap.
    return_freed_memory()
    settings = Settings.model_validate_json(config.settings)
    configure_logging(config.identity, settings)
    run_event_loop(_run(config, settings))
    return 0


async def _run(config: HttpProcessConfig, settings: Settings) -> None:
    """Serve until SIGTERM or the end of the supervisor."""
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    supervisor = SupervisorLink(await http_process_end(socket.socket(fileno=config.link)))
    metrics = FrontendMetrics(CollectorRegistry())
    ProcessCollector(registry=metrics.registry)
    engine = EngineClient(config.identity)
    registry = open_registry(settings, make=False)
    service = Service(settings, registry, metrics, engine, supervisor)
    obeying = asyncio.create_task(supervisor.obey(service, engine))
    obeying.add_done_callback(lambda _: stopped.set())
    starting = asyncio.create_task(supervisor.start(service))
    await serve(service, [inherited(descriptor) for descriptor in config.listening], stopped)
    for task in (starting, obeying):
        task.cancel()


class SupervisorLink:
    """The supervisor, as an HTTP process sees it."""

    def __init__(self, link: ControlLink[SupervisorMessage]) -> None:
        self._link = link
        self._call_ids = itertools.count()
        # Answers that are waited for, by their call's kind and id.
        self._waiting: dict[tuple[str, int], asyncio.Future[Any]] = {}
        self._has_engine = asyncio.Event()

    async def start(self, service: Service) -> None:
        """Start the service when an engine is ready, and say whether it can serve."""
        await self._has_engine.wait()
        try:
            await service.start(service.engine.facts.base)
        except PeraxisError as error:
            self._link.send(CannotServe(str(error)))
        else:
            self._link.send(Serving())

    async def metrics(self) -> Snapshot:
        """Return the metrics of all processes of the server."""
        call_id = next(self._call_ids)
        found: Snapshot = await self._answer_to(("metrics", call_id), MetricsOfServerWanted(call_id))
        return found

    async def forget_variants(self, labels: Collection[str]) -> None:
        """Remove deleted variants from the metrics of the server."""
        self._link.send(VariantsDeleted(tuple(labels)))

    async def adapters(self, change: AdapterChange) -> tuple[LoadedAdapter, ...]:
        """Change the server's record of loaded adapters, and return it."""
        call_id = next(self._call_ids)
        call = AdaptersWanted(call_id, change)
        found: tuple[LoadedAdapter, ...] = await self._answer_to(("adapters", call_id), call)
        return found

    async def stats(self) -> ServerStats:
        """Return the statistics of the whole server."""
        call_id = next(self._call_ids)
        stats: ServerStats = await self._answer_to(("stats", call_id), StatsWanted(call_id))
        return stats

    async def put_source_job(self, job: SourceJob) -> bool:
        """Keep a state of a job that this process runs; False for a new one of a tenant that may have no more."""
        call_id = next(self._call_ids)
        return await self._answer_to(("source", call_id), PutSourceJob(call_id, job)) is not None

    async def find_source_job(self, tenant: str, name: str, job_id: str) -> SourceJob | None:
        """Return the last state of a tenant's job; None if there is none."""
        call_id = next(self._call_ids)
        call = SourceJobWanted(call_id, tenant, name, job_id)
        found: SourceJob | None = await self._answer_to(("source", call_id), call)
        return found

    async def ask(self, call: LimitQuestion) -> LimitAnswer:
        """Return the answer to a call about a tenant's limits."""
        answer: LimitAnswer = await self._answer_to(("limit", call.call_id), call)
        return answer

    def tell(self, call: AddTokens | GiveBack) -> None:
        """Send a call about a seat, and do not wait for its answer."""
        self._link.send(call)

    async def _answer_to(self, key: tuple[str, int], call: HttpProcessMessage) -> Any:
        answer = self._waiting[key] = asyncio.get_running_loop().create_future()
        self._link.send(call)
        try:
            return await answer
        finally:
            del self._waiting[key]

    def _answered(self, key: tuple[str, int], result: object) -> None:
        answer = self._waiting.get(key)
        # A late answer is not waited for any more.
        if answer is not None and not answer.done():
            answer.set_result(result)

    async def obey(self, service: Service, engine: EngineClient) -> None:
        """Do what the supervisor says until it ends."""
        while (message := await self._link.receive()) is not None:
            match message:
                case EngineStarted(address):
                    engine.connect(address)
                    engine.welcomed.add_done_callback(self._on_welcomed)
                case EngineLost():
                    engine.disconnect()
                case Ping():
                    self._link.send(Pong())
                case MetricsWanted(call_id):
                    self._link.send(MetricsOfProcess(call_id, take_snapshot(service.metrics.registry)))
                case MetricsOfServer(call_id, snapshot):
                    self._answered(("metrics", call_id), snapshot)
                case Adapters(call_id, adapters):
                    self._answered(("adapters", call_id), adapters)
                case SourceJobAnswer(call_id, job):
                    self._answered(("source", call_id), job)
                case StatsAnswer(call_id, stats):
                    self._answered(("stats", call_id), stats)
                case (
                    SeatTaken()
                    | TokensAdded()
                    | TokensCounted()
                    | UploadGrown()
                    | SeatRefused()
                    | UsageOfTenant()
                    | LimitsUnknown()
                ):
                    self._answered(("limit", message.call_id), message)

    def _on_welcomed(self, welcomed: asyncio.Future[EngineFacts]) -> None:
        if not welcomed.cancelled() and welcomed.exception() is None:
            self._has_engine.set()


if __name__ == "__main__":
    sys.exit(main())
