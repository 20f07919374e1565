"""Run a command of Peraxis on a terminal of its own, as a user does who types."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from dataclasses import dataclass
from pathlib import Path

from tests.server.helpers.live_server import clean_environment

ROOT = Path(__file__).resolve().parents[3]
WAIT_S = 240.0


@dataclass(frozen=True, slots=True)
class Session:
    """The end of a command that ran on a terminal, and all that the terminal got, input included."""

    code: int
    screen: str


def on_terminal(*args: str, typed: tuple[tuple[str, bytes], ...] = (), **environment: str) -> Session:
    """Run a command on a pseudo-terminal.

    Args:
        args: Its arguments.
        typed: Keys, each sent once the text before them has appeared on the screen.
        environment: Variables beside those of the tests.
    """
    controller, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (30, 100))
    command = [sys.executable, "-m", "peraxis", *args]
    variables = {**clean_environment(), "TERM": "xterm", **environment}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=variables,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=_take_terminal,
    )
    os.close(terminal)
    try:
        return Session(*_watched(process, controller, list(typed)))
    finally:
        process.kill()
        process.wait()
        os.close(controller)


def _take_terminal() -> None:
    """Make Ctrl-C a signal for this process, also where the tests run in the background, which ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _watched(
    process: subprocess.Popen[bytes], controller: int, typed: list[tuple[str, bytes]]
) -> tuple[int, str]:
    screen, seen, deadline = b"", 0, time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if typed and (found := screen.find(typed[0][0].encode(), seen)) >= 0:
            seen = found + len(typed[0][0])
            os.write(controller, typed.pop(0)[1])
        if not select.select([controller], [], [], 0.1)[0]:
            continue
        try:
            piece = os.read(controller, 65536)
        except OSError:
            # The last process has closed the terminal.
            break
        screen += piece
    assert not typed, (typed, screen)
    return process.wait(WAIT_S), screen.decode()
