"""Records which files of a source tree have functions called in any Python process that has `environment`."""

from __future__ import annotations

import mmap
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# Python imports this module in every process before anything else. It is text, because it must not import ours.
# Module and class bodies, and what they call, are left out: an import is no call. The hook is off meanwhile, because
# with it the imports of torch and transformers take several times as long.
SITECUSTOMIZE = """
    import inspect, mmap, os, sys, threading, time
    from importlib.machinery import SourceFileLoader

    TREE, DIRECTORY = {tree!r}, {directory!r}
    PACKAGES = tuple(TREE + package + "/" for package in {packages!r})
    with open(os.path.join(DIRECTORY, "phase"), "rb") as file:
        PHASE = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
    LOG = open(os.path.join(DIRECTORY, str(os.getpid()) + ".calls"), "a", buffering=1)
    with open("/proc/self/cmdline") as file:
        WORDS = file.read().split("\\0")
    LOG.write((WORDS[WORDS.index("-m") + 1] if "-m" in WORDS else "peraxis") + "\\n")
    SEEN = set()

    def hook(frame, event, argument):
        code, phase = frame.f_code, PHASE[0]
        call = (phase, code.co_filename)
        if not phase or event != "call" or call in SEEN or not code.co_flags & inspect.CO_OPTIMIZED:
            return
        SEEN.add(call)
        if code.co_filename.startswith(PACKAGES):
            LOG.write(f"{{phase}} {{time.monotonic_ns()}} {{code.co_filename[len(TREE):]}}\\n")

    run_module = SourceFileLoader.exec_module

    def exec_module(loader, module):
        profile = sys.getprofile()
        sys.setprofile(None)
        try:
            run_module(loader, module)
        finally:
            sys.setprofile(profile)

    SourceFileLoader.exec_module = exec_module
    threading.setprofile(hook)
    sys.setprofile(hook)
"""
PACKAGES = ("client", "compressor", "deltastore", "peraxis", "server")
# For calls that follow a reply, such as the release of what a request held.
SETTLE_S = 1.0


@dataclass(frozen=True, slots=True)
class FileCall:
    """The first call of a function of a file in one process."""

    at_ns: int
    process: str  # what it runs, such as server.engine.main
    file: str


class CallHook:
    """Records phases of the processes that are started with `environment`.

    Args:
        tree: directory of the source.
        directory: an empty directory for what is recorded.
    """

    def __init__(self, tree: Path, directory: Path) -> None:
        self._directory = directory
        self._num_phases = 0
        (directory / "phase").write_bytes(b"\0")
        text = textwrap.dedent(SITECUSTOMIZE).format(
            tree=f"{tree}/", directory=str(directory), packages=PACKAGES
        )
        (directory / "sitecustomize.py").write_text(text)
        self.environment = {"PYTHONPATH": f"{directory}:{tree}"}

    @contextmanager
    def recording(self) -> Iterator[list[FileCall]]:
        """Yield a list that has the calls, in the order of time, when the block has ended."""
        self._num_phases += 1
        calls: list[FileCall] = []
        self._set_phase(self._num_phases)
        try:
            yield calls
            time.sleep(SETTLE_S)
        finally:
            self._set_phase(0)
        for log in self._directory.glob("*.calls"):
            process, *lines = log.read_text().splitlines()
            for line in lines:
                phase, at_ns, file = line.split(" ", 2)
                if int(phase) == self._num_phases:
                    calls.append(FileCall(int(at_ns), process, file))
        calls.sort(key=lambda call: call.at_ns)

    def _set_phase(self, phase: int) -> None:
        with (self._directory / "phase").open("r+b") as file, mmap.mmap(file.fileno(), 1) as shared:
            shared[0] = phase
