"""Processes of a server and what surrounds them: start, end and deaths of children, signals, ports and directories."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import logging
import math
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from deltastore.errors import SettingsError
from server.errors import EngineFailed
from server.settings import Settings

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_id: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, and exit if its parent is gone already.

    The parent must start it on a thread that lives as long as the parent, such as the main thread.

    Args:
        parent_id: the parent's process id, as the parent gave it.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    # It may have died before the kernel knew.
    if os.getppid() != parent_id:
        sys.exit(1)


# Prints whether the engine of --backend auto is vLLM, in the interpreter that would run it.
HAS_VLLM = """
from importlib.util import find_spec
if find_spec("vllm") is None: print("vLLM is not installed")
elif find_spec("peraxis_vllm") is None: print("vLLM's plugin peraxis-vllm is not installed")
else:
    import torch
    print("" if torch.cuda.is_available() else "there is no CUDA device")
"""


def with_backend(settings: Settings) -> Settings:
    """Return settings in which `backend` is no longer auto, and log which one serves and why."""
    if settings.backend != "auto":
        log.info("the engine is %s, as --backend says", settings.backend)
        return settings
    why_not = "--device is cpu" if settings.device == "cpu" else ""
    if not why_not and settings.engine_python is None and find_spec("vllm") is None:
        why_not = "vLLM is not installed"
    if not why_not:
        why_not = _why_no_vllm(str(settings.engine_python or sys.executable))
    backend = "native" if why_not else "vllm"
    log.info("the engine is %s: %s", backend, why_not or "vLLM is installed and there is a CUDA device")
    return settings.model_copy(update={"backend": backend})


def _why_no_vllm(python: str) -> str:
    """Return why an interpreter cannot run vLLM on CUDA; "" if it can."""
    try:
        done = subprocess.run([python, "-P", "-c", HAS_VLLM], capture_output=True, text=True, check=False)
    except OSError as error:
        return f"{python} does not start: {error.strerror}"
    if done.returncode == 0:
        return done.stdout.strip()
    return f"{python} ended with {done.returncode}: {done.stderr.strip().rpartition(chr(10))[2]}"


KILL_S = 5.0


class ChildProcess:
    """A running `python -P -m MODULE`, started with a configuration on its standard input."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(
        cls,
        module: str,
        config: msgspec.Struct,
        pass_fds: tuple[int, ...] = (),
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ) -> ChildProcess:
        """Start the module with an interpreter. Its output goes where this process's goes.

        A process group of its own keeps a terminal's Ctrl-C from it: the supervisor ends it in order. Call this on the
        main thread, because the kernel kills it when the thread that started it ends.
        """
        process = await asyncio.create_subprocess_exec(
            # The working directory may hold a user's `server.py`.
            *(python, "-P", "-m", module),
            stdin=asyncio.subprocess.PIPE,
            pass_fds=pass_fds,
            process_group=0,
            env={**os.environ, **(environment or {})},
        )
        child = cls(process)
        if process.stdin is not None:
            # A child that dies at once is found by `wait`.
            with contextlib.suppress(OSError):
                process.stdin.write(msgspec.json.encode(config))
                await process.stdin.drain()
            process.stdin.close()
        return child

    @property
    def process_id(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Return the exit code; a negative one is the signal that killed it."""
        return await self._process.wait()

    def terminate(self) -> None:
        """Send SIGTERM."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def kill_group(self) -> None:
        """Send SIGKILL to the processes that it has started and that are left of its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def stop(self, timeout_s: float = KILL_S) -> None:
        """Send SIGTERM, and SIGKILL after `timeout_s`; return when it has ended."""
        self.terminate()
        try:
            await asyncio.wait_for(self.wait(), timeout_s)
        except TimeoutError:
            self.kill()
            await self.wait()


def exit_of(code: int) -> str:
    """Return how a process with this exit code has ended."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"


log = logging.getLogger(__name__)

# Deaths further apart than this are not in a row.
WINDOW_S = 60.0


class Restarts:
    """The deaths of one kind of process: those within the last `window_s` seconds, and since the last progress."""

    def __init__(self, what: str, max_deaths: int, window_s: float = WINDOW_S) -> None:
        self._what = what
        self._max_deaths = max_deaths
        self._window_s = window_s
        self._within = f"within {window_s:g} s" if math.isfinite(window_s) else "in a row"
        self._deaths: deque[float] = deque()

    def progressed(self) -> None:
        """Forget the deaths so far."""
        self._deaths.clear()

    def count_death(self, code: int) -> None:
        """Count a death with this exit code, and log it.

        Raises:
            EngineFailed: it is one more than may be.
        """
        now = time.monotonic()
        self._deaths.append(now)
        while now - self._deaths[0] > self._window_s:
            self._deaths.popleft()
        how = exit_of(code)
        if len(self._deaths) > self._max_deaths:
            raise EngineFailed(
                f"{self._what} has ended {len(self._deaths)} times {self._within}, at last with {how}: "
                "see its log, then start the server again"
            )
        log.error("%s has ended with %s: it is started again", self._what, how)


INTERRUPTED = 130


def first_signal() -> asyncio.Future[int]:
    """Return a future of the first SIGTERM's or SIGINT's exit code. A second signal has its default effect."""
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[int] = loop.create_future()

    def on_signal(code: int) -> None:
        stopped.set_result(code)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    loop.add_signal_handler(signal.SIGTERM, on_signal, 0)
    loop.add_signal_handler(signal.SIGINT, on_signal, INTERRUPTED)
    return stopped


async def first_of(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of the futures is done."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


PREFIX = "peraxis-server-"
# A directory this young may belong to a server that has not locked it yet.
YOUNG_S = 60.0


@contextmanager
def runtime_directory() -> Iterator[Path]:
    """Make the directory of sockets and remove it at the end; remove those of servers that were killed, too.

    Raises:
        SettingsError: it cannot be made, as on a full disk.
    """
    # The path of a Unix socket has at most 107 bytes, which TMPDIR may exceed.
    parent = Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp")
    with _locked_directory(parent, "sockets", "XDG_RUNTIME_DIR") as directory:
        yield directory


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """Make the directory of temporary files, which may be large, as `runtime_directory` makes that of sockets.

    Raises:
        SettingsError: it cannot be made.
    """
    with _locked_directory(Path(tempfile.gettempdir()), "temporary files", "TMPDIR") as directory:
        yield directory


@contextmanager
def _locked_directory(parent: Path, purpose: str, variable: str) -> Iterator[Path]:
    _remove_stale(parent)
    try:
        directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    except OSError as error:
        raise SettingsError(
            f"no directory for {purpose} can be made in {parent}: {error.strerror}: set {variable} to another one"
        ) from error
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield directory
    finally:
        os.close(descriptor)
        shutil.rmtree(directory, ignore_errors=True)


def _remove_stale(parent: Path) -> None:
    """Remove this user's directories that no running server has locked."""
    for directory in parent.glob(f"{PREFIX}*"):
        # Another user's, or removed by another server meanwhile.
        with suppress(OSError):
            found = directory.lstat()
            if (
                found.st_uid == os.getuid()
                and time.time() - found.st_mtime > YOUNG_S
                and not _is_locked(directory)
            ):
                shutil.rmtree(directory, ignore_errors=True)


def _is_locked(directory: Path) -> bool:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


# More wait in the kernel than there are places, so that none has to try again after a second.
BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket, which child processes may inherit by its descriptor.

    Args:
        host: a name or an address; of several addresses the first.
        port: 0 takes a free one.

    Raises:
        SettingsError: the address is not available.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
        )[0]
        # asyncio sets TCP_NODELAY only on connections of a socket whose protocol is IPPROTO_TCP.
        listening = socket.socket(family, kind, proto)
    except OSError as error:
        raise _unavailable(host, port, error) from error
    try:
        # A restarted server may bind while connections of the last one are still in TIME_WAIT.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise _unavailable(host, port, error) from error
    return listening


@contextmanager
def listening_sockets(settings: Settings) -> Iterator[list[socket.socket]]:
    """Open the public socket and, with an admin port, its socket; close them at the end.

    Raises:
        SettingsError: an address is not available.
    """
    raise_descriptor_limit()
    with ExitStack() as stack:
        addresses = [(settings.host, settings.port)]
        if settings.admin_port is not None:
            addresses.append((settings.admin_host or settings.host, settings.admin_port))
        yield [stack.enter_context(listen(*address)) for address in addresses]


def inherited(descriptor: int) -> socket.socket:
    """Return the listening socket that the parent process opened with `listen`."""
    return socket.socket(fileno=descriptor)


def url_of(listening: socket.socket) -> str:
    """Return the URL that clients use."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def urls_of(sockets: Sequence[socket.socket]) -> str:
    """Return the public URL and, if there is an admin port, its URL, as a part of a sentence."""
    public, *admin = map(url_of, sockets)
    return f"{public}, and administered at {admin[0]}" if admin else public


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open file descriptors to the hard limit, and return it. Children inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def _unavailable(host: str, port: int, error: OSError) -> SettingsError:
    return SettingsError(f"cannot listen on {host}:{port}: {error.strerror}: choose another --host or --port")
