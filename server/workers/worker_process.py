"""One worker process as its parent has it: forked from a template, given a task at a time, killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from server.errors import WorkerDied, WorkerKilled
from server.workers.worker_main import EXIT_CODE, REPLY_HEADER, TASK_HEADER, Limits, Reply

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
# A reply is read in parts of it.
PART_BYTES = 256 << 10
# Signals by which a process ends itself. A failed allocation in Rust aborts.
CRASHES: Mapping[int, str] = {
    kind.value: kind.name for kind in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL)
}


class WorkerTemplate:
    """A child process that runs `worker_main.py`: it imports modules once and forks workers, which end with it.

    It ends with this process, and is started again for the next worker if it ended alone.
    """

    def __init__(self, modules: tuple[str, ...], niceness: int) -> None:
        self._arguments = (str(niceness), *modules)
        self._started: tuple[subprocess.Popen[bytes], socket.socket] | None = None

    def fork(self, scratch: Path) -> tuple[socket.socket, socket.socket]:
        """Order a worker with a directory for its temporary files.

        Returns:
            A socket for its tasks, and one that kills it when it is shut, and then has its exit code.

        Raises:
            WorkerKilled: the process follows no orders.
        """
        orders = self._orders()
        tasks, their_tasks = socket.socketpair()
        life, their_life = socket.socketpair()
        tasks.setblocking(False)
        life.setblocking(False)
        with their_tasks, their_life:
            try:
                descriptors = [their_tasks.fileno(), their_life.fileno()]
                socket.send_fds(orders, [os.fsencode(scratch)], descriptors)
            except OSError as error:
                tasks.close()
                life.close()
                raise WorkerKilled(f"a worker process did not start: {error}") from error
        return tasks, life

    def kill(self) -> None:
        """Kill the process, and with it its workers; the next one is forked from another."""
        if self._started is not None:
            self._started[0].kill()
            # It takes milliseconds, and until then the process seems to run.
            self._started[0].wait()

    def _orders(self) -> socket.socket:
        """Return the running process's socket for orders."""
        if self._started is not None:
            process, orders = self._started
            if process.poll() is None:
                return orders
            orders.close()
        orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        orders.setblocking(False)
        with theirs:
            command = (sys.executable, "-P", "-m", "server.workers.worker_main", str(os.getpid()))
            process = subprocess.Popen(
                (*command, *self._arguments), stdin=theirs.fileno(), env={**_inherited(), **ONE_THREAD}
            )
        self._started = process, orders
        return orders


@cache
def template_of(modules: tuple[str, ...], niceness: int) -> WorkerTemplate:
    """Return the template of this process whose workers have imported `modules`; pools share it."""
    return WorkerTemplate(modules, niceness)


class WorkerProcess:
    """A worker, with a directory of its own for temporary files. Event loop only.

    Args:
        template: forks it.
        directory: where it gets its own.

    Raises:
        WorkerKilled: the template follows no orders.
    """

    def __init__(self, template: WorkerTemplate, directory: Path) -> None:
        self._template = template
        self._scratch = Path(tempfile.mkdtemp(dir=directory))
        self._tasks, self._life = template.fork(self._scratch)
        self._is_ready = False
        self._is_last = False
        self._ending: asyncio.Task[int | None] | None = None

    async def ready(self) -> None:
        """Wait until the worker takes tasks.

        Raises:
            WorkerKilled: it ended before it was ready, or was not ready after `START_S`.
        """
        try:
            async with asyncio.timeout(START_S):
                await self._receive()
            self._is_ready = True
        except TimeoutError as error:
            self._template.kill()
            raise WorkerKilled(f"a worker process was not ready after {START_S:g} s") from error
        except (EOFError, ConnectionError) as error:
            ended = "was killed" if self._is_last else await self._end()
            raise WorkerKilled(f"a worker process did not start: it {ended}") from error

    @property
    def is_usable(self) -> bool:
        """False once the worker has ended, or ends after its last reply."""
        if self._is_last:
            return False
        try:
            return self._tasks.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    async def call(self, task: bytes, limits: Limits) -> Reply:
        """Run one task, as `pack_task` made it. After a cancellation only `kill` may follow.

        Raises:
            WorkerDied: the worker ended before its reply; the message says why.
            WorkerKilled: it was killed from outside.
        """
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self._tasks, TASK_HEADER.pack(len(task)))
            await loop.sock_sendall(self._tasks, task)
            reply = pickle.loads(await self._receive())
        except (EOFError, ConnectionError) as error:
            reason = f"the work {await self._end(limits)}"
            # No limit sends it; `kill` does, after which no call is awaited.
            is_from_outside = await self._exit_code() in (None, -signal.SIGKILL)
            raise (WorkerKilled if is_from_outside else WorkerDied)(reason) from error
        assert isinstance(reply, Reply)
        return reply

    def kill(self) -> None:
        """Kill the worker, whatever it does. A call under way finds it ended."""
        self._is_last = True
        # The worker or its template may have ended.
        with contextlib.suppress(OSError):
            self._tasks.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._life.shutdown(socket.SHUT_WR)

    async def wait(self) -> None:
        """Wait until the worker, which was killed, has ended, and remove its temporary files."""
        # One that was not ready has had no task, and ends as soon as its template forks it.
        if self._is_ready or self._ending is not None:
            await self._exit_code()
        await asyncio.to_thread(shutil.rmtree, self._scratch, ignore_errors=True)
        self._tasks.close()
        self._life.close()

    async def _receive(self) -> bytes:
        size, self._is_last = REPLY_HEADER.unpack(await self._read(REPLY_HEADER.size))
        return await self._read(size)

    async def _read(self, size: int) -> bytes:
        loop, parts = asyncio.get_running_loop(), []
        while size:
            part = await loop.sock_recv(self._tasks, min(size, PART_BYTES))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    async def _end(self, limits: Limits | None = None) -> str:
        """Return why the worker ended, as a predicate."""
        code = await self._exit_code()
        if code is None:
            return "was ended with the process that it was forked from"
        if limits is not None and code == -signal.SIGXCPU:
            return f"needed more than {limits.cpu_s:g} s of processor time"
        if limits is not None and -code in CRASHES:
            return (
                f"needed more than {limits.memory_bytes >> 20} MiB of memory, or crashed ({CRASHES[-code]})"
            )
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

    async def _exit_code(self) -> int | None:
        """End the worker unless it has ended, and return its exit code; None if its template ended."""
        if self._ending is None:
            self.kill()
            self._ending = asyncio.create_task(self._reap())
        return await asyncio.shield(self._ending)

    async def _reap(self) -> int | None:
        try:
            code = await asyncio.get_running_loop().sock_recv(self._life, EXIT_CODE.size)
        except ConnectionError:
            return None
        return EXIT_CODE.unpack(code)[0] if code else None


def _inherited() -> dict[str, str]:
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def pack_task(function: Callable[..., Any], args: tuple[Any, ...], limits: Limits) -> bytes:
    """Pickle a task. The worker imports `function` by its module and name."""
    return pickle.dumps((function, args, limits))
