"""A process that answers batches: a configuration and then batches go in as JSON lines, and answers come out."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bench.peers.contender import Prompts, check_length

END_S = 60


@dataclass(frozen=True, slots=True)
class PeerProcess:
    """A running process whose model is loaded."""

    loaded: Mapping[str, Any]  # its first answer
    _input: IO[str]
    _output: IO[str]
    _log: Path

    def answer(self, prompts: Prompts, num_new: int, **how: Any) -> None:
        """Let it generate `num_new` tokens for each prompt.

        Raises:
            RuntimeError: it ended, or generated another number of tokens.
        """
        batch = {"prompts": [list(one) for one in prompts], "num_new": num_new, **how}
        print(json.dumps(batch), file=self._input, flush=True)
        check_length(_read(self._output, self._log)["num_tokens"], len(prompts) * num_new)


@contextmanager
def running_peer(
    command: Sequence[object],
    config: Mapping[str, Any],
    log: Path,
    variables: Mapping[str, str] | None = None,
) -> Iterator[PeerProcess]:
    """Start a peer, wait until its model is loaded, and end it.

    Raises:
        RuntimeError: with the end of `log`, when it does not start.
    """
    pipe, words = subprocess.PIPE, [str(part) for part in command]
    environment = {**os.environ, **(variables or {})}
    with (
        log.open("w") as errors,
        subprocess.Popen(
            words, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=environment
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            print(json.dumps(config), file=process.stdin, flush=True)
            yield PeerProcess(_read(process.stdout, log), process.stdin, process.stdout, log)
        finally:
            _end(process, process.stdin)


def _end(process: subprocess.Popen[str], its_input: IO[str]) -> None:
    """Close the input, at whose end a peer ends; kill it if it does not."""
    with contextlib.suppress(BrokenPipeError):
        its_input.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _read(output: IO[str], log: Path) -> dict[str, Any]:
    if line := output.readline():
        return dict(json.loads(line))
    raise RuntimeError(f"a peer ended: {log.read_text()[-4000:]}")
