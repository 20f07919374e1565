"""An HTTP process: `python -m server.http_process`, started by the supervisor with a configuration on standard input.

It accepts on the supervisor's listening sockets, and ends with its link to the supervisor. Imports no torch.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import sys
from typing import cast

from msgspec import json

# First, so that transformers is imported without torch.
import server.text.without_torch  # noqa: F401

# isort: split
from deltastore.errors import PeraxisError
from deltastore.memory import return_freed_memory
from server.api.service import Service
from server.app import serve
from server.log import configure_logging
from server.metrics.metrics import FrontendMetrics
from server.processes import die_with_parent, inherited
from server.protocol.control import (
    CannotServe,
    ControlLink,
    EngineLost,
    EngineStarted,
    HttpProcessConfig,
    MetricsOfProcess,
    MetricsWanted,
    Ping,
    Pong,
    RemoteState,
    Serving,
    StateAnswer,
    SupervisorMessage,
    check_version,
    http_process_end,
)
from server.protocol.engine_client import EngineClient
from server.protocol.messages import EngineFacts
from server.registry_calls import open_registry
from server.settings import Settings
from server.shared_state import SharedState
from server.web_server import run_event_loop

# The event loop waits for the interpreter's lock while threads parse bodies and read the registry. Python's default of
# 5 ms each would hold up every stream.
SWITCH_S = 0.0005
# New objects between two passes of the garbage collector. Python's default is 700.
GC_ALLOCATIONS = 5000


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
    metrics = FrontendMetrics(process=True)
    engine = EngineClient(config.identity, settings.resume_timeout)
    registry = open_registry(settings, make=False)
    service = Service(settings, registry, metrics, engine, cast(SharedState, supervisor.state))
    obeying = asyncio.create_task(supervisor.obey(service, engine))
    obeying.add_done_callback(lambda _: stopped.set())
    starting = asyncio.create_task(supervisor.start(service))
    await serve(service, [inherited(descriptor) for descriptor in config.listening], stopped)
    for task in (starting, obeying):
        task.cancel()


class SupervisorLink:
    """The supervisor and the shared state that it has, as an HTTP process sees them."""

    def __init__(self, link: ControlLink[SupervisorMessage]) -> None:
        self._link = link
        self.state = RemoteState(link.send)
        self._has_engine = asyncio.Event()

    async def start(self, service: Service) -> None:
        """Start the service when an engine is ready, and say whether it can serve."""
        await self._has_engine.wait()
        try:
            await service.start(service.engine.facts.base)
        except PeraxisError as error:
            self._link.send(CannotServe(str(error)))
        else:
            _collect_less()
            self._link.send(Serving())

    async def obey(self, service: Service, engine: EngineClient) -> None:
        """Do what the supervisor says until it ends."""
        while (message := await self._link.receive()) is not None:
            match message:
                case EngineStarted(address, quarantined):
                    engine.quarantine(quarantined)
                    engine.connect(address)
                    engine.welcomed.add_done_callback(self._on_welcomed)
                case EngineLost(culprits, given_up, quarantined):
                    engine.engine_lost(culprits, given_up, quarantined)
                case Ping():
                    self._link.send(Pong())
                case MetricsWanted(call_id):
                    self._link.send(MetricsOfProcess(call_id, service.metrics.snapshot()))
                case StateAnswer():
                    self.state.take(message)

    def _on_welcomed(self, welcomed: asyncio.Future[EngineFacts]) -> None:
        if not welcomed.cancelled() and welcomed.exception() is None:
            self._has_engine.set()


def _collect_less() -> None:
    """Exempt what the start has made from garbage collection, and collect after more allocations than by default.

    With hundreds of streams, passes over their events take a fifth of the event loop's time otherwise.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS, *gc.get_threshold()[1:])


if __name__ == "__main__":
    sys.exit(main())
