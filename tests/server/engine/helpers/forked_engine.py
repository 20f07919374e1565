"""Engines in processes of their own, forked from one process that has imported torch and transformers.

Each is a process as a server's engine is, without the seconds that its imports take.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import tests.helpers.short_idle  # noqa: F401
from bench.engine import STOP_S
from server.engine.main import run_engine
from server.errors import EngineFailed
from server.protocol.control import EngineConfig
from server.settings import Settings

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__, "server.engine.build", "server.kernels.attention_cpu"])


@contextmanager
def forked_engine(settings: Settings, address: str) -> Iterator[Callable[[], None]]:
    """Run an engine on `address`; yield what stops it.

    Raises:
        EngineFailed: it has ended with an error.
    """
    process = _context.Process(target=_run, args=(settings.model_dump_json(), address))
    process.start()
    try:
        yield process.terminate
    finally:
        process.terminate()
        process.join(STOP_S)
        code = process.exitcode
        process.kill()
        process.join()
        process.close()
    if code != 0:
        raise EngineFailed(f"the engine ended with exit code {code}")


def _run(settings: str, address: str) -> None:
    threading.Thread(target=_end_with_the_tests, name="tests", daemon=True).start()
    # Its parent is the process that it was forked from.
    sys.exit(run_engine(EngineConfig(settings, address, os.getppid())))


def _end_with_the_tests() -> None:
    """End this process when that of the tests is gone, which is not its parent."""
    tests = multiprocessing.parent_process()
    assert tests is not None
    tests.join()
    os._exit(1)
