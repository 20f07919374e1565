"""One worker process as its parent has it: started, given a task at a time, killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from server.errors import WorkerDied, WorkerKilled
from server.workers.worker_main import REPLY_HEADER, TASK_HEADER, Limits, Reply

# Beside other programs a niced process takes minutes for its imports. It imports no file of a tenant meanwhile.
START_S = 300.0
# One thread is enough for one task, and threads of numeric libraries spin.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
# Variables of the environment that a worker gets if they are set: the rest may hold keys, and a worker parses tenants'
# files.
VARIABLES = (
    *(
        "PATH",
        "HOME",
        "TZ",
        "LANG",
        "LC_ALL",
        "LC_CTYPE",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "MALLOC_ARENA_MAX",
    ),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"),
    *("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
)
# Signals by which a process ends itself. A failed allocation in Rust aborts.
CRASHES: Mapping[int, str] = {
    kind.value: kind.name for kind in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL)
}


class WorkerProcess:
    """A child process that runs `worker_main.py`, with a directory of its own for temporary files. Event loop only."""

    def __init__(self, process: asyncio.subprocess.Process, scratch: Path) -> None:
        self._process = process
        self._scratch = scratch
        self._is_last = False

    @classmethod
    async def spawn(cls, modules: tuple[str, ...], directory: Path, niceness: int) -> Self:
        """Start a process, which imports `modules`. Must not be cancelled: asyncio would leave its pipes open.

        Args:
            directory: where the process gets a directory for its temporary files.
            niceness: what is added to the niceness of this process.
        """
        scratch = Path(tempfile.mkdtemp(dir=directory))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "server.workers.worker_main"),
            *(str(os.getpid()), str(niceness), *modules),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**_inherited(), **ONE_THREAD, "TMPDIR": str(scratch)},
        )
        return cls(process, scratch)

    async def ready(self) -> None:
        """Wait until the process takes tasks.

        Raises:
            WorkerKilled: it ended before it was ready, or was not ready after `START_S`.
        """
        try:
            async with asyncio.timeout(START_S):
                await self._receive()
        except TimeoutError as error:
            raise WorkerKilled(f"a worker process was not ready after {START_S:g} s") from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise WorkerKilled(f"a worker process did not start: it {await self._end()}") from error

    @property
    def is_usable(self) -> bool:
        """False once the process has ended, or ends after its last reply."""
        return not self._is_last and self._process.returncode is None

    async def call(self, task: bytes, limits: Limits) -> Reply:
        """Run one task, as `pack_task` made it. After a cancellation only `kill` may follow.

        Raises:
            WorkerDied: the process ended before its reply; the message says why.
            WorkerKilled: it was killed from outside.
        """
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.writelines([TASK_HEADER.pack(len(task)), task])
            await stdin.drain()
            reply = pickle.loads(await self._receive())
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            reason = f"the work {await self._end(limits)}"
            # No limit sends it; `kill` does, after which no call is awaited.
            is_from_outside = self._process.returncode == -signal.SIGKILL
            raise (WorkerKilled if is_from_outside else WorkerDied)(reason) from error
        assert isinstance(reply, Reply)
        return reply

    def kill(self) -> None:
        """Kill the process, whatever it does."""
        self._is_last = True
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def wait(self) -> None:
        """Wait until the process has ended and remove its temporary files."""
        await self._process.wait()
        await asyncio.to_thread(shutil.rmtree, self._scratch, ignore_errors=True)

    async def _receive(self) -> bytes:
        stdout = self._process.stdout
        assert stdout is not None
        size, self._is_last = REPLY_HEADER.unpack(await stdout.readexactly(REPLY_HEADER.size))
        return await stdout.readexactly(size)

    async def _end(self, limits: Limits | None = None) -> str:
        """Return why the process ended, as a predicate."""
        self._is_last = True
        code = await self._process.wait()
        if limits is not None and code == -signal.SIGXCPU:
            return f"needed more than {limits.cpu_s:g} s of processor time"
        if limits is not None and -code in CRASHES:
            return (
                f"needed more than {limits.memory_bytes >> 20} MiB of memory, or crashed ({CRASHES[-code]})"
            )
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _inherited() -> dict[str, str]:
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def pack_task(function: Callable[..., Any], args: tuple[Any, ...], limits: Limits) -> bytes:
    """Pickle a task. The worker imports `function` by its module and name."""
    return pickle.dumps((function, args, limits))
