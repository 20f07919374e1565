"""Tasks for worker pools, well-behaved and hostile. Imported by workers, so this file imports little."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from server.errors import InvalidRequest


def add(first: int, second: int) -> int:
    return first + second


def pid_of_worker() -> int:
    return os.getpid()


def surroundings() -> tuple[str, list[str]]:
    """Return the directory for temporary files, and what the open files of the process are."""
    # The one that lists them is closed again.
    files = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return tempfile.gettempdir(), files


def spin(started: Path | None = None) -> None:
    """Use processor time for ever; write the process's id to `started` first."""
    if started is not None:
        started.with_suffix(".part").write_text(str(os.getpid()))
        started.with_suffix(".part").rename(started)
    while True:
        pass


def wait_for(path: Path) -> int:
    """Wait until a file exists and return the process's id."""
    while not path.exists():
        time.sleep(0.002)
    return os.getpid()


def probe_when(path: Path, tokenizer: Any) -> None:
    """Wait until a file exists, then use a tokenizer as its first request does."""
    from server.text.worker_tasks import probe

    wait_for(path)
    probe(tokenizer)


def allocate(num_bytes: int) -> int:
    return len(bytearray(num_bytes))


def hoard(num_bytes: int) -> int:
    """Keep memory in a global, as a leak does."""
    hoarded.append(b"x" * num_bytes)
    return os.getpid()


def normalize_to_a_terabyte() -> str:
    """Allocate 10^12 bytes inside the tokenizers package, which aborts the process."""
    from tokenizers import normalizers

    step = normalizers.Replace("a", "a" * 10**6)
    return str(normalizers.Sequence([step, step]).normalize_str("a"))


def refuse() -> None:
    raise InvalidRequest("no", "messages")


def fail() -> None:
    raise LookupError("a defect")


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def write_to_standard_streams() -> str:
    print("noise")
    print("noise", file=sys.stderr)
    os.write(1, b"noise")
    return sys.stdin.read()


def make_text(num_characters: int) -> str:
    return "x" * num_characters


def imported() -> set[str]:
    return set(sys.modules)


hoarded: list[bytes] = []
