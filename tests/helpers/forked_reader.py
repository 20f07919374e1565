"""Checks of a variant's files in forks of one process that has imported what they need, in place of a new one each.

A program, `python -m tests.helpers.forked_reader`: each line of its standard input has the arguments of a check.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def forked_readers() -> Iterator[None]:
    """Fork the processes that `compress` and `import` start to check files; other programs are started as ever."""
    import pytest

    from compressor import outputs

    template: list[subprocess.Popen[str]] = []
    turn = threading.Lock()

    def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        if command[3] != "server.publishing.checks":
            return subprocess.run(command, **options)
        with turn:
            if not template:
                program = [sys.executable, "-m", "tests.helpers.forked_reader"]
                pipe = subprocess.PIPE
                template.append(subprocess.Popen(program, cwd=ROOT, text=True, stdin=pipe, stdout=pipe))
            process = template[0]
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(command[4:]) + "\n")
            process.stdin.flush()
            code, written, errors = json.loads(process.stdout.readline())
        return subprocess.CompletedProcess(command, code, written.encode(), errors.encode())

    replaced = SimpleNamespace(run=run, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(outputs, "subprocess", replaced)
        yield
    for process in template:
        process.communicate()


def main() -> None:
    """Check the files that each line names in a fork, and print its exit code and what it wrote."""
    import server.text.without_torch
    import server.text.worker_tasks  # noqa: F401
    from server.publishing.checks import main as check

    for line in sys.stdin:
        files, base, num_rows, where = json.loads(line)
        with TemporaryFile() as output, TemporaryFile() as errors:
            child = os.fork()
            if child == 0:
                os.dup2(output.fileno(), 1)
                os.dup2(errors.fileno(), 2)
                sys.exit(check(Path(files), Path(base), int(num_rows), where))
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            texts = []
            for file in (output, errors):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        print(json.dumps([code, *texts]), flush=True)


if __name__ == "__main__":
    main()
