"""Memory and processor time of a process and of all processes below it. Starts and ends none of them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil

SAMPLE_S = 0.05


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
