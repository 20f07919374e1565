"""One source tree: its commands and servers run from there, with the packages that this environment has installed."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0
COMMAND_S = 300.0


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """The end of a command."""

    exit_code: int
    output: str
    errors: str

    def document(self) -> Any:
        return json.loads(self.output)


@dataclass(frozen=True, slots=True)
class SourceTree:
    """A directory with the source of Peraxis.

    Raises:
        RuntimeError: from `check`, Python imports another tree.
    """

    directory: Path

    @classmethod
    def of_revision(cls, revision: str, directory: Path) -> Self:
        """Write the files of a commit to a new directory."""
        directory.mkdir()
        archive = subprocess.run(("git", "archive", revision), cwd=ROOT, check=True, capture_output=True)
        subprocess.run(("tar", "-x", "-C", str(directory)), input=archive.stdout, check=True)
        return cls(directory)

    def check(self) -> None:
        program = "import server; print(server.__file__)"
        done = subprocess.run(
            [sys.executable, "-P", "-c", program],
            env=self.environment(),
            capture_output=True,
            text=True,
            check=True,
        )
        if Path(done.stdout.strip()).parent.parent != self.directory:
            raise RuntimeError(f"{self.directory} is not what Python imports, but {done.stdout.strip()}")

    def environment(self, **variables: str) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("PERAXIS_")}
        own = {
            "PYTHONPATH": str(self.directory), "COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb",
            "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        return {**inherited, **own, **variables}

    def run(self, *args: object, **variables: str) -> CommandOutcome:
        """Run one command to its end."""
        done = subprocess.run(
            self._command(args),
            cwd="/",
            env=self.environment(**variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        return CommandOutcome(done.returncode, done.stdout, done.stderr)

    @contextmanager
    def serving(
        self, log: Path, *args: object, **variables: str
    ) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
        """Start a server; yield it with the lines that it printed until it was ready, and kill it at the end."""
        with log.open("w") as errors:
            process = subprocess.Popen(
                self._command(("serve", *args)),
                cwd="/",
                env=self.environment(**variables),
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert process.stdout is not None
        try:
            lines = [""]
            while " is served at " not in lines[-1]:
                if not select.select([process.stdout], [], [], START_S)[0] or process.poll() is not None:
                    raise RuntimeError(f"no server: {log.read_text()}")
                lines.append(process.stdout.readline())
            yield process, lines[1:]
        finally:
            process.kill()
            process.wait()
            process.stdout.close()

    def _command(self, args: Sequence[object]) -> list[str]:
        return [sys.executable, "-P", "-m", "peraxis", *map(str, args)]
