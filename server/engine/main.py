"""The engine process: `python -m server.engine.main`, started by the supervisor with an EngineConfig on standard input.

Its exit code is 0 when it was told to stop, `CANNOT_START` when the base could not be loaded, and `FAILED` after an
error that it has logged.
"""

from __future__ import annotations

import gc
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from msgspec import json

from deltastore.errors import PeraxisError
from server.engine.clients import EngineSocket, refuse_clients
from server.errors import Draining
from server.log import configure_logging
from server.metrics.metrics import EngineMetrics
from server.processes import die_with_parent
from server.protocol.control import EngineConfig, check_version
from server.protocol.step_page import StepPage, Suspect
from server.registry_calls import open_registry
from server.settings import Settings

log = logging.getLogger(__name__)

FAILED, CANNOT_START = 1, 3
# How long clients have to ask why the engine cannot start.
REFUSE_S = 10.0


def main() -> int:
    """Read the configuration and run the engine. Return the exit code."""
    return run_engine(json.decode(sys.stdin.buffer.read(), type=EngineConfig))


def run_engine(config: EngineConfig) -> int:
    """Load the base and serve clients until SIGTERM, as the only work of this process. Return the exit code."""
    die_with_parent(config.parent_id)
    check_version(config)
    settings = Settings.model_validate_json(config.settings)
    configure_logging("engine", settings)
    stopping = threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    metrics = EngineMetrics(process=True)
    supervision = None
    if config.page is not None:
        supervision = Supervision(StepPage(Path(config.page), settings.max_num_seqs), config.suspects)
    try:
        return serve_engine(settings, config.address, metrics, stopping, supervision)
    except Exception:
        # Logged, because Python would print the message as it is, in which there may be a tenant's text.
        log.exception("the engine has failed")
        return FAILED


@dataclass(frozen=True, slots=True)
class Supervision:
    """The arguments of `Engine.supervise`, for an engine that another one follows when it fails."""

    page: StepPage
    suspects: tuple[Suspect, ...]


def freeze_startup_objects() -> None:
    """Exempt existing objects from garbage collection, whose pass over the model takes longer than several steps."""
    gc.collect()
    gc.freeze()


def serve_engine(
    settings: Settings,
    address: str,
    metrics: EngineMetrics,
    stopping: threading.Event,
    supervision: Supervision | None = None,
    on_built: Callable[[], None] = freeze_startup_objects,
) -> int:
    """Bind `address`, load the base and serve clients on this thread until `stopping` is set. Return an exit code.

    Without `supervision` no other engine follows: every request fails with this one.
    `on_built` is called before the first step. A process that outlives the engine passes a function that does nothing,
    because frozen objects would never be freed.

    Raises:
        EngineFailed: the address cannot be bound.
        Exception: the model's own, when its device is lost.
    """
    socket = EngineSocket(address)
    try:
        # Deferred, because it imports torch and transformers: clients can already connect.
        with without_collection():
            if settings.backend == "vllm":
                from server.engine.vllm_backend import build_vllm_engine as build_engine
            else:
                from server.engine.build import build_engine
        engine = build_engine(settings, open_registry(settings, make=False), metrics, socket, stopping)
        if supervision is not None:
            engine.supervise(supervision.page, supervision.suspects)
        on_built()
        engine.run(stopping)
    except Draining:
        return 0
    except PeraxisError as error:
        # Not logged here: each client gets the error, and the supervisor reports it.
        refuse_clients(socket, error, REFUSE_S, stopping)
        return CANNOT_START
    finally:
        socket.close()
    return 0


@contextmanager
def without_collection() -> Iterator[None]:
    """Import modules without garbage collection, and exempt all objects that exist then from later passes.

    What modules create stays. Passes over it free nothing, and take a third of the time of importing torch and
    transformers.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


if __name__ == "__main__":
    sys.exit(main())
