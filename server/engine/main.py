"""The engine process: `python -m server.engine.main`, started by the supervisor with an EngineConfig on standard input.

Its exit code is 0 when it was told to stop, `CANNOT_START` when the base could not be loaded, and `FAILED` after an
error that it has logged.
"""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import shutil
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from msgspec import json

from deltastore.errors import PeraxisError
from deltastore.user_cache import user_cache_dir
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
# Read when vLLM and what it needs are imported; what the operator has set stays.
VLLM_ENVIRONMENT = {
    # The engine in this process, which our own processes surround already.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    # It would log to standard output, on which a server prints one line.
    "VLLM_CONFIGURE_LOGGING": "0",
    # The second one has not run with deltas yet.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # HTTP processes need the cores, too, and would wait for a thread that spins on a core of its own.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # This process has threads, whose locks a fork would copy.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
# Where torch and vLLM keep what they compile, 150 MB of it, which would lie under /tmp otherwise: of each variable the
# directory in our cache, and the part of it that is compiled.
COMPILED = {"TORCHINDUCTOR_CACHE_DIR": ("inductor", "."), "VLLM_CACHE_ROOT": ("vllm", "torch_compile_cache")}


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
        with ExitStack() as building:
            with without_collection():
                if settings.backend == "vllm":
                    building.enter_context(compiling(user_cache_dir()))
                    log.info(
                        "vLLM loads and compiles the model: a first start takes minutes, a later one less"
                    )
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
def compiling(cache: Path) -> Iterator[None]:
    """Set what vLLM reads when it is imported, and note in a directory that this process compiles inside the block.

    torch writes its libraries in place, and takes one that is there as it is: a process that is killed while it
    compiles leaves a part of one, with which no later engine could start. So what is compiled is removed if such a
    process was killed and no other one is compiling.
    """
    for name, value in VLLM_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name, (directory, _) in COMPILED.items():
        os.environ.setdefault(name, str(cache / directory))
    notes = cache / "compiling"
    try:
        notes.mkdir(mode=0o700, parents=True, exist_ok=True)
        note = (notes / f".{uuid.uuid4().hex}").open("w")
    except OSError:
        # A user without a home: nothing is kept.
        yield
        return
    with note:
        fcntl.flock(note, fcntl.LOCK_EX)
        own = Path(note.name).rename(notes / uuid.uuid4().hex)
        others = {path: is_locked(path) for path in notes.iterdir() if path != own and path.name[0] != "."}
        if others and not any(others.values()):
            log.warning("an engine was killed while it compiled: what was compiled is removed and made again")
            for name, (directory, part) in COMPILED.items():
                if os.environ[name] == str(cache / directory):
                    shutil.rmtree(cache / directory / part, ignore_errors=True)
            for path in others:
                path.unlink(missing_ok=True)
        try:
            yield
        finally:
            own.unlink(missing_ok=True)


def is_locked(path: Path) -> bool:
    """True if a process holds a lock of a file; False if it does not, or the file is gone."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


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
