"""Keeps HTTP processes running, all on the same listening sockets, with the state that they share."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deltastore.errors import NotServable, PeraxisError
from server.errors import LinkBroken
from server.metrics.aggregator import Aggregator
from server.metrics.instruments import Snapshot, process_families
from server.processes import ChildProcess, Restarts
from server.protocol.control import (
    CannotServe,
    ControlLink,
    EngineLost,
    EngineStarted,
    HttpProcessConfig,
    HttpProcessMessage,
    MetricsOfProcess,
    MetricsWanted,
    Ping,
    Pong,
    Serving,
    StateCall,
    perform,
    supervisor_end,
)
from server.protocol.engine_client import EngineClient
from server.protocol.messages import Resident
from server.settings import Settings
from server.shared_state import COLLECT_S, SharedState
from server.tenants.tenant import TenantLimits

log = logging.getLogger(__name__)

PING_S = 5.0
# Without an answer to a Ping, after which an HTTP process counts as hung.
HUNG_S = 30.0
# The same for the first answer, which waits for imports that a cold or busy disk delays.
START_S = 180.0
# Sources of metrics beside the HTTP processes.
ENGINE, SUPERVISOR = "engine", "supervisor"


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


class HttpKeeper:
    """Runs `--http-workers` HTTP processes; starts a new one for each that dies.

    Args:
        sockets: listening sockets, the public port's first, then the admin port's if there is one.
        scratch: holds a directory per process for its temporary files.
        engine: is told of processes that have died, and asked for its metrics.
        limits_of: returns a tenant's limits now; raises QueueFull if they are unknown.
        on_serving: called whenever a process serves for the first time.
    """

    def __init__(
        self,
        settings: Settings,
        sockets: list[socket.socket],
        scratch: Path,
        engine: EngineClient,
        limits_of: Callable[[str], TenantLimits],
        on_serving: Callable[[], None],
    ) -> None:
        self.shared = SharedState(self, limits_of)
        self._settings = settings
        self._sockets = sockets
        self._scratch = scratch
        self._engine = engine
        self._on_serving = on_serving
        self._restarts = Restarts("an HTTP process", settings.max_restarts)
        self._processes: dict[str, _HttpProcess] = {}
        self._identities = (f"http-{number}" for number in itertools.count(1))
        self._call_ids = itertools.count()
        self._engine_news: EngineStarted | EngineLost = EngineLost()
        self._draining = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.shared.aggregator.started(SUPERVISOR)

    @property
    def num_serving(self) -> int:
        """Number of processes that serve."""
        return sum(process.serving for process in self._processes.values())

    def announce_engine(self, news: EngineStarted | EngineLost) -> None:
        """Tell every process, now and later, of a new engine or of an engine's death."""
        self._engine_news = news
        if isinstance(news, EngineStarted):
            self.shared.aggregator.started(ENGINE)
        else:
            self.shared.aggregator.ended(ENGINE)
        for process in self._processes.values():
            process.link.send(news)

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

    async def collect(self, aggregator: Aggregator) -> None:
        """Give the aggregator the snapshots that come in time."""
        asked = {name: self._ask_metrics(process) for name, process in self._processes.items()}
        engine = asyncio.create_task(self._collect_engine(aggregator))
        if asked:
            await asyncio.wait(asked.values(), timeout=COLLECT_S)
        # To its end, so that its snapshot does not come during the next collection.
        await engine
        for name, answer in asked.items():
            if answer.done() and not answer.cancelled():
                aggregator.received(name, answer.result())
        aggregator.received(SUPERVISOR, Snapshot(process_families()))

    async def residents(self) -> Sequence[Resident]:
        """Return the deltas in memory; without a ready engine, none."""
        with contextlib.suppress(PeraxisError, TimeoutError):
            return await asyncio.wait_for(self._engine.residents(), COLLECT_S)
        return ()

    async def forget_variants(self, labels: tuple[str, ...]) -> None:
        """Have the engine forget deleted variants."""
        self._engine.forget_variants(frozenset(labels))

    async def _collect_engine(self, aggregator: Aggregator) -> None:
        # While no engine is ready, the totals of the one before stand.
        with contextlib.suppress(PeraxisError, TimeoutError):
            aggregator.received(ENGINE, await asyncio.wait_for(self._engine.metrics(), COLLECT_S))

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
                self.shared.lost(running.identity)
                self._engine.report_gone(running.identity.encode())
                await asyncio.to_thread(shutil.rmtree, self._scratch_of(running.identity), ignore_errors=True)
            if not self._draining:
                self._restarts.count_death(code)

    async def _start(self) -> _HttpProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            identity = next(self._identities)
            descriptors = [listening.fileno() for listening in self._sockets]
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
        self.shared.aggregator.started(identity)
        if self._draining:
            process.terminate()
        running.link.send(self._engine_news)
        return running

    async def _run_one(self, running: _HttpProcess) -> int:
        """Answer a process's messages until it ends. Return its exit code."""
        pinging = asyncio.create_task(self._ping(running))
        try:
            while (message := await running.link.receive()) is not None:
                self._handle(running, message)
            return await running.process.wait()
        except LinkBroken as error:
            log.error("%s sent %s: it is killed", running.identity, error)
            running.process.kill()
            return await running.process.wait()
        finally:
            pinging.cancel()
            await running.link.close()

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
            case StateCall():
                # Tasks begin in the order in which they are made. One that nothing refers to may be collected.
                task = asyncio.create_task(self._answer(running, message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _answer(self, running: _HttpProcess, call: StateCall) -> None:
        if running.identity not in self._processes:
            # What a process that has ended asked last would never be released.
            return
        try:
            running.link.send(await perform(self.shared, call))
        except LinkBroken as error:
            log.error("%s sent %s: it is killed", running.identity, error)
            running.process.kill()

    def _scratch_of(self, identity: str) -> Path:
        return self._scratch / identity
