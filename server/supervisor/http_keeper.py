"""Keeps HTTP processes running, all on the same listening sockets, and talks to each over its link."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shutil
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path

from server.control_link import ControlLink, supervisor_end
from server.errors import LinkBroken, NotServable
from server.frontend.engine_client import EngineClient
from server.metrics.snapshot import Snapshot
from server.protocol.adapters import LoadedAdapters
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
from server.protocol.limits import LimitCall
from server.protocol.processes import HttpProcessConfig
from server.settings import Settings
from server.sources.board import SourceBoard
from server.supervisor.child_process import ChildProcess
from server.supervisor.process_metrics import ProcessMetrics
from server.supervisor.restarts import Restarts
from server.tenants.limits.ledger import Ledger

log = logging.getLogger(__name__)

PING_S = 5.0
# Without an answer to a Ping, after which an HTTP process counts as hung.
HUNG_S = 30.0
# The same for the first answer, which waits for imports that a cold or busy disk delays.
START_S = 180.0


@dataclass(slots=True, eq=False)
class _HttpProcess:
    """A running HTTP process and its end of the link."""

    identity: str
    process: ChildProcess
    link: ControlLink[HttpProcessMessage]
    serving: bool = False
    # The time of the loop at which it counts as hung.
    hung_at: float = field(default_factory=lambda: asyncio.get_running_loop().time() + START_S)
    calls: dict[int, asyncio.Future[Snapshot]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SharedByHttp:
    """The things that all HTTP processes of a server share.

    Args:
        sockets: listening sockets, the public port's first, then the admin port's if there is one.
        scratch: holds a directory per process for its temporary files.
        ledger: counts tenants' limits.
    """

    sockets: list[socket.socket]
    scratch: Path
    ledger: Ledger


class HttpKeeper:
    """Runs `--http-workers` HTTP processes; starts a new one for each that dies.

    Args:
        engine: is told of processes that have died.
        metrics: is told of starts and ends, and answers scrapes.
        on_serving: called whenever a process serves for the first time.
    """

    def __init__(
        self,
        settings: Settings,
        shared: SharedByHttp,
        engine: EngineClient,
        metrics: ProcessMetrics,
        on_serving: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._shared = shared
        self._engine = engine
        self._metrics = metrics
        self._on_serving = on_serving
        self._restarts = Restarts("an HTTP process", settings.max_restarts)
        self._processes: dict[str, _HttpProcess] = {}
        self._identities = (f"http-{number}" for number in itertools.count(1))
        self._call_ids = itertools.count()
        self._engine_address: str | None = None
        self._draining = False
        self._adapters = LoadedAdapters()
        self._board = SourceBoard()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_serving(self) -> int:
        """Number of processes that serve."""
        return sum(process.serving for process in self._processes.values())

    def announce_engine(self, address: str | None) -> None:
        """Tell every process, now and later, where the engine is; None when it has died."""
        self._engine_address = address
        for process in self._processes.values():
            process.link.send(self._engine_message())

    async def run(self) -> None:
        """Keep the processes running until `drain`; kill them when cancelled.

        Raises:
            NotServable: a process cannot serve the base.
            EngineFailed: processes die one after the other.
        """
        keeping = [asyncio.create_task(self._keep_one()) for _ in range(self._settings.http_workers)]
        try:
            # The first error ends all.
            await asyncio.gather(*keeping)
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)

    def drain(self) -> None:
        """Let every process end its requests and exit."""
        self._draining = True
        for process in self._processes.values():
            process.process.terminate()

    async def snapshots(self, timeout_s: float) -> dict[str, Snapshot]:
        """Return the metrics of each process by its identity; those that do not answer in time are missing."""
        asked = {name: self._ask_metrics(process) for name, process in self._processes.items()}
        if asked:
            await asyncio.wait(asked.values(), timeout=timeout_s)
        return {
            name: answer.result()
            for name, answer in asked.items()
            if answer.done() and not answer.cancelled()
        }

    def _ask_metrics(self, process: _HttpProcess) -> asyncio.Future[Snapshot]:
        call_id = next(self._call_ids)
        answer: asyncio.Future[Snapshot] = asyncio.get_running_loop().create_future()
        process.calls[call_id] = answer
        process.link.send(MetricsWanted(call_id))
        return answer

    async def _keep_one(self) -> None:
        while not self._draining:
            running = await self._start()
            try:
                code = await self._run_one(running)
            finally:
                del self._processes[running.identity]
                running.process.kill()
                await running.process.wait()
                self._metrics.aggregator.ended(running.identity)
                self._board.lost(running.identity)
                self._engine.report_gone(running.identity.encode())
                self._shared.ledger.free(running.identity)
                await asyncio.to_thread(shutil.rmtree, self._scratch_of(running.identity), ignore_errors=True)
            if not self._draining:
                self._restarts.count_death(code)

    async def _start(self) -> _HttpProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            identity = next(self._identities)
            descriptors = [listening.fileno() for listening in self._shared.sockets]
            config = HttpProcessConfig(
                self._settings.model_dump_json(), identity, os.getpid(), theirs.fileno(), descriptors
            )
            scratch = self._scratch_of(identity)
            scratch.mkdir()
            process = await ChildProcess.start(
                "server.http_process",
                config,
                pass_fds=(theirs.fileno(), *descriptors),
                environment={"TMPDIR": str(scratch)},
            )
        running = _HttpProcess(identity, process, await supervisor_end(ours))
        self._processes[identity] = running
        self._metrics.aggregator.started(identity)
        if self._draining:
            process.terminate()
        running.link.send(self._engine_message())
        return running

    async def _run_one(self, running: _HttpProcess) -> int:
        """Answer a process's messages until it ends. Return its exit code."""
        pinging = asyncio.create_task(self._ping(running))
        try:
            while (message := await running.link.receive()) is not None:
                if isinstance(message, LimitCall):
                    await self._count(running, message)
                else:
                    self._handle(running, message)
            return await running.process.wait()
        except LinkBroken as error:
            log.error("%s sent %s: it is killed", running.identity, error)
            running.process.kill()
            return await running.process.wait()
        finally:
            pinging.cancel()
            await running.link.close()

    async def _count(self, running: _HttpProcess, call: LimitCall) -> None:
        answer = await self._shared.ledger.answer(running.identity, call)
        if answer is not None:
            running.link.send(answer)

    async def _ping(self, running: _HttpProcess) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < running.hung_at:
            running.link.send(Ping())
            await asyncio.sleep(PING_S)
        log.error("%s does not answer: it is killed", running.identity)
        running.process.kill()

    def _handle(self, running: _HttpProcess, message: HttpProcessMessage) -> None:
        match message:
            case Pong():
                running.hung_at = asyncio.get_running_loop().time() + HUNG_S
            case CannotServe(reason):
                raise NotServable(reason)
            case Serving():
                running.serving = True
                self._on_serving()
            case MetricsOfProcess(call_id, snapshot):
                answer = running.calls.pop(call_id, None)
                if answer is not None and not answer.done():
                    answer.set_result(snapshot)
            case AdaptersWanted(call_id, change):
                running.link.send(Adapters(call_id, self._adapters.apply(change)))
            case MetricsOfServerWanted(call_id):
                self._start_task(self._send_metrics(running, call_id))
            case VariantsDeleted(labels):
                self._metrics.forget_variants(frozenset(labels))
            case PutSourceJob(call_id, job):
                is_kept = self._board.put(running.identity, job)
                running.link.send(SourceJobAnswer(call_id, job if is_kept else None))
            case SourceJobWanted(call_id, tenant, name, job_id):
                running.link.send(SourceJobAnswer(call_id, self._board.find(tenant, name, job_id)))
            case StatsWanted(call_id):
                self._start_task(self._send_stats(running, call_id))

    async def _send_metrics(self, running: _HttpProcess, call_id: int) -> None:
        running.link.send(MetricsOfServer(call_id, await self._metrics.merged(self.snapshots)))

    async def _send_stats(self, running: _HttpProcess, call_id: int) -> None:
        running.link.send(StatsAnswer(call_id, await self._metrics.stats(self.snapshots)))

    def _start_task(self, work: Coroutine[None, None, None]) -> None:
        # A task that nothing refers to may be collected.
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _scratch_of(self, identity: str) -> Path:
        return self._shared.scratch / identity

    def _engine_message(self) -> SupervisorMessage:
        return EngineLost() if self._engine_address is None else EngineStarted(self._engine_address)
