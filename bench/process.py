"""Child processes of benches: their time and memory, commands, ports, and a server with the calls made to it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

SAMPLE_S = 0.05


def free_port() -> int:
    """Return a port that no process listens on, below those that the kernel and Ray give of their own accord."""
    while True:
        port = 20000 + secrets.randbelow(10000)
        with contextlib.suppress(OSError), socket.create_server(("0.0.0.0", port)):
            return port


class ProcessTree:
    """A process and its descendants, which may come and go."""

    def __init__(self, pid: int) -> None:
        self._root = pid

    def memory(self) -> dict[str, int]:
        """Return the resident bytes of all processes by field of `/proc/PID/status`; empty when all have ended."""
        total = Counter[str]()
        for process in self._processes():
            total.update(memory_of(process.pid))
        return dict(total)

    def cpu_s(self) -> dict[str, float]:
        """Return the processor time of the running processes by their part of the server."""
        total: dict[str, float] = {}
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                part, times = part_of(process.cmdline()), process.cpu_times()
                total[part] = total.get(part, 0.0) + times.user + times.system
        return total

    def of_each(self, field: str) -> dict[int, tuple[str, int]]:
        """Return the part of each running process, and its bytes in a field of `/proc/PID/status`, by its id."""
        found = {}
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                found[process.pid] = part_of(process.cmdline()), memory_of(process.pid).get(field, 0)
        return found

    def restart_peaks(self) -> None:
        """Make Linux count the peaks of the running processes from now on."""
        for process in self._processes():
            # It may have ended.
            with contextlib.suppress(OSError):
                reset_peak(process.pid)

    def _processes(self) -> Iterator[psutil.Process]:
        try:
            root = psutil.Process(self._root)
            yield from (root, *root.children(recursive=True))
        except psutil.NoSuchProcess:
            return


class Peak:
    """Peak resident memory of a process tree, the sum of its processes' own peaks.

    It is sampled until the tree ends, because Linux drops a process's peak with the process.
    """

    def __init__(self, tree: ProcessTree) -> None:
        self.num_bytes = self.highest = 0
        self._tree = tree
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def restart(self) -> None:
        """Reset the peak; `highest` keeps the maximum so far."""
        with self._lock:
            self.highest = max(self.highest, self.num_bytes, self._tree.memory().get("VmHWM", 0))
            self._tree.restart_peaks()
            self.num_bytes = self._tree.memory().get("VmHWM", 0)

    def _watch(self) -> None:
        while self._sample():
            time.sleep(SAMPLE_S)

    def _sample(self) -> int:
        with self._lock:
            found = self._tree.memory().get("VmHWM", 0)
            self.num_bytes = max(self.num_bytes, found)
        return found


def part_of(command: list[str]) -> str:
    """Name a process by its module or program: `server.engine.main` is `engine`. A zombie has no command."""
    module = command[command.index("-m") + 1] if "-m" in command[:-1] else Path("".join(command[:1])).name
    return module.split(".")[1] if module.startswith("server.") else module


def reset_peak(pid: int) -> None:
    """Make Linux count a process's peak of resident memory, `VmHWM`, from now on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def memory_of(pid: int) -> dict[str, int]:
    """Return the resident bytes of a process by field of `/proc/PID/status`; empty when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines if line.startswith(("VmRSS:", "VmHWM:", "RssAnon:", "RssFile:")))
    return {name.rstrip(":"): int(size) << 10 for name, size, *_ in fields}


CALL_S = 1800.0


@dataclass(frozen=True, slots=True)
class Ran:
    """Measurements of a command that has ended."""

    seconds: float
    cpu_s: float  # of all its threads
    peak_bytes: int
    result: dict[str, Any]  # the JSON document that it printed, or {}


def run(command: Sequence[object], environment: Mapping[str, str] | None = None) -> Ran:
    """Run a command to its end.

    Raises:
        RuntimeError: with the end of its standard error, when it fails.
    """
    start = time.perf_counter()
    process = _started(command, environment)
    peak, before = Peak(ProcessTree(process.pid)), os.times()
    output, errors = process.communicate()
    seconds, after = time.perf_counter() - start, os.times()
    if process.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: exit {process.returncode}\n{errors[-4000:]}")
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    text = output.strip()
    return Ran(seconds, cpu_s, peak.num_bytes, json.loads(text) if text.startswith("{") else {})


def peraxis(*args: object, environment: Mapping[str, str] | None = None) -> Ran:
    """Run a `peraxis` command."""
    return run([sys.executable, "-m", "peraxis", *args], environment)


def module(name: str, *args: object) -> Ran:
    """Run a module, given by its full name, in a process of its own."""
    return run([sys.executable, "-m", name, *args])


@dataclass(slots=True)
class Server:
    """A server in processes of its own."""

    process: subprocess.Popen[str]
    url: str
    ready_s: float
    tree: ProcessTree
    peak: Peak
    client: httpx.Client

    def memory(self) -> dict[str, int]:
        """Return the resident bytes of all its processes by field of `/proc/PID/status`."""
        return self.tree.memory()

    def upload(self, name: str, artifact: Path) -> float:
        """Publish an artifact; return the seconds until the reply."""
        start = time.perf_counter()
        with artifact.open("rb") as body:
            headers = {
                "Content-Type": "application/octet-stream",
                "Content-Length": str(artifact.stat().st_size),
            }
            _checked(
                self.client.post("/variants", params={"name": name}, content=_blocks(body), headers=headers)
            )
        return time.perf_counter() - start

    def generate(self, variant: str | None, prompt: str, num_new: int) -> dict[str, Any]:
        """Send one greedy request and return the reply's document."""
        body = {"prompt": prompt, "max_new_tokens": num_new, "temperature": 0}
        params = {} if variant is None else {"variant": variant}
        return _checked(self.client.post("/generate", params=params, json=body))

    def unload(self, variant: str) -> None:
        """Free a variant's slot and wait until it is free."""
        _checked(self.client.post(f"/variants/{variant}/unload"))
        while any(
            one["level"] == "device" for one in _checked(self.client.get(f"/variants/{variant}"))["versions"]
        ):
            time.sleep(0.005)

    def metrics(self) -> dict[str, float]:
        """Return the values of /metrics by their series."""
        lines = self.client.get("/metrics").text.splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {series: float(value) for series, _, value in pairs}


def serve_command(base: Path, registry: Path, *flags: object) -> list[object]:
    """Return the command that serves a base on a free port."""
    return [
        sys.executable,
        "-m",
        "peraxis",
        "serve",
        "--base",
        base,
        "--registry",
        registry,
        "--port",
        0,
        *flags,
    ]


@contextmanager
def serving(
    command: Sequence[object], environment: Mapping[str, str] | None = None, checkout: Path | None = None
) -> Iterator[Server]:
    """Start a server, wait for the line that says where it serves, and end it with SIGTERM.

    With `checkout`, the command imports the modules of that directory rather than this repository's.

    Raises:
        RuntimeError: with the end of the server's log, when it does not start or ends with an error.
    """
    start = time.perf_counter()
    process = _started(command, environment, checkout)
    log: list[str] = []
    reader = threading.Thread(target=lambda: log.extend(process.stderr or ()), daemon=True)
    reader.start()
    tree = ProcessTree(process.pid)
    peak = Peak(tree)
    try:
        line = process.stdout.readline() if process.stdout is not None else ""
        if " served at " not in line:
            process.wait(CALL_S)
            raise RuntimeError(f"the server did not start: {''.join(log)[-4000:]}")
        ready_s = time.perf_counter() - start
        # The admin port's comes after it.
        url = next(word for word in line.split() if word.startswith("http://")).rstrip(",")
        limits = httpx.Limits(max_connections=64)
        with httpx.Client(base_url=url, timeout=CALL_S, limits=limits) as client:
            yield Server(process, url, ready_s, tree, peak, client)
        process.terminate()
        if code := process.wait(CALL_S):
            raise RuntimeError(f"the server ended with {code}: {''.join(log)[-4000:]}")
    finally:
        process.kill()
        process.wait()
        reader.join()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def _blocks(body: Any) -> Iterator[bytes]:
    while block := body.read(1 << 20):
        yield block


def _checked(reply: httpx.Response) -> dict[str, Any]:
    if reply.is_error:
        raise RuntimeError(f"{reply.request.method} {reply.request.url}: {reply.status_code} {reply.text}")
    return dict(reply.json())


def _started(
    command: Sequence[object], environment: Mapping[str, str] | None, checkout: Path | None = None
) -> subprocess.Popen[str]:
    words = [str(part) for part in command]
    pipe = subprocess.PIPE
    variables = _env(environment)
    if checkout is not None:
        variables["PYTHONPATH"] = str(checkout)
    # `python -m` imports from its working directory first.
    return subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, env=variables, cwd=checkout)


def _env(more: Mapping[str, str] | None) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PERAXIS_")}
    return {**inherited, **(more or {})}
