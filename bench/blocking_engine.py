"""An engine and a client of it for programs that call and wait: benches and tests.

The engine is a process, as a server's is, or a thread of this one, where a test can reach into it. Events arrive on the
thread of the client's event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, TypeVar

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from deltastore.openmp_policy import bound_spinning
from deltastore.registry.records import VersionRecord
from server.engine.main import serve_engine
from server.errors import EngineFailed
from server.metrics.exposition import render
from server.metrics.metrics import EngineMetrics
from server.protocol.control import EngineConfig
from server.protocol.engine_client import EngineClient, OnEvent
from server.protocol.messages import DeltaState, EngineFacts, LoadAction
from server.protocol.request import Request
from server.settings import Settings

Mode = Literal["process", "thread"]
START_S = 600.0
STOP_S = 60.0

# Runs an engine that listens on an address, and yields what stops it.
EngineRunner = Callable[[Settings, str], AbstractContextManager[Callable[[], None]]]

T = TypeVar("T")
_numbers = itertools.count()


class BlockingEngine:
    """A client of a running engine. Any thread may call it."""

    def __init__(
        self, client: EngineClient, loop: asyncio.AbstractEventLoop, stop: Callable[[], None]
    ) -> None:
        self._client = client
        self._loop = loop
        self.stop = stop

    @property
    def facts(self) -> EngineFacts:
        return self._client.facts

    @property
    def num_embeddings(self) -> int:
        """Rows of the base's embedding."""
        base = self.facts.base
        return base.shapes[base.embedding or ""][0]

    def submit(self, request: Request, on_event: OnEvent, first_mask: bytes | None = None) -> None:
        """Send a request; raises what `EngineClient.submit` does. `on_event` is called with each event."""
        self.run(lambda: self._client.submit(request, on_event, first_mask))

    def send_mask(self, request_id: str, index: int, position: int, bits: bytes | None) -> None:
        """Send a mask for the next token of a sequence."""
        self._loop.call_soon_threadsafe(self._client.send_mask, request_id, index, position, bits)

    def cancel(self, request_id: str) -> None:
        self._loop.call_soon_threadsafe(self._client.cancel, request_id)

    def stop_sequence(self, request_id: str, index: int) -> None:
        self._loop.call_soon_threadsafe(self._client.stop_sequence, request_id, index)

    def load(self, record: VersionRecord, action: LoadAction = "load") -> Future[None]:
        """Start a load, pin, unpin or unload; the future is done when it has happened."""

        async def call() -> None:
            await self._client.load(action, record)

        return asyncio.run_coroutine_threadsafe(call(), self._loop)

    def state_of(self, record: VersionRecord) -> DeltaState:
        """Return where a version's delta is now, and its pin and requests."""
        (state,) = self.wait(self._client.residency_of((record.label,)))
        return state

    def metric(self, name: str, **labels: str) -> float:
        """Return the value of one of the engine's series, such as ``preemptions_total``; 0 if there is none."""
        text = render(self.wait(self._client.metrics())).decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == f"peraxis_{name}" and sample.labels == labels:
                    return sample.value
        return 0.0

    def run(self, call: Callable[[], T]) -> T:
        """Run a function on the client's event loop and return its result."""

        async def run() -> T:
            return call()

        return self.wait(run())

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the client's event loop and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(START_S)


@contextmanager
def engine_process(settings: Settings, address: str) -> Iterator[Callable[[], None]]:
    """Run an engine in a process that is started as the supervisor starts its own."""
    config = EngineConfig(settings.model_dump_json(), address, os.getpid())
    environment = dict(os.environ)
    bound_spinning(environment)
    command = [sys.executable, "-P", "-m", "server.engine.main"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    assert process.stdin is not None
    with process.stdin as stdin:
        stdin.write(msgspec.json.encode(config))
    try:
        yield process.terminate
    finally:
        process.terminate()
        try:
            code = process.wait(STOP_S)
        finally:
            process.kill()
            process.wait()
    if code:
        raise EngineFailed(f"the engine ended with exit code {code}")


@contextmanager
def running_engine(
    settings: Settings, mode: Mode = "process", run_process: EngineRunner = engine_process
) -> Iterator[BlockingEngine]:
    """Run an engine and a client of it; `run_process` runs it in mode "process".

    Raises:
        PeraxisError: the engine cannot start.
        EngineFailed: it has ended with an error.
    """
    with _event_loop() as loop, tempfile.TemporaryDirectory(prefix="peraxis-") as directory:
        name = f"engine-{next(_numbers)}"
        address = f"ipc://{directory}/{name}" if mode == "process" else f"inproc://{name}"
        with (run_process if mode == "process" else _engine_thread)(settings, address) as stop:
            client = asyncio.run_coroutine_threadsafe(_connected(address), loop).result(START_S)
            try:
                yield BlockingEngine(client, loop, stop)
            finally:
                asyncio.run_coroutine_threadsafe(_disconnected(client), loop).result(STOP_S)


async def _connected(address: str) -> EngineClient:
    client = EngineClient("blocking")
    client.connect(address)
    await client.welcomed
    return client


async def _disconnected(client: EngineClient) -> None:
    client.disconnect()


@contextmanager
def _event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="client", daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(STOP_S)
        loop.close()


@contextmanager
def _engine_thread(settings: Settings, address: str) -> Iterator[Callable[[], None]]:
    stopping = threading.Event()
    with ThreadPoolExecutor(1, "engine") as thread:
        metrics = EngineMetrics()
        served = thread.submit(serve_engine, settings, address, metrics, stopping, on_built=lambda: None)
        try:
            yield stopping.set
        finally:
            stopping.set()
            wait([served])
    if code := served.result():
        raise EngineFailed(f"the engine ended with {code}")
