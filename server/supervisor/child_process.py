"""Start a process of the server and end it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping

import msgspec

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
    ) -> ChildProcess:
        """Start the module. Its output goes where this process's goes.

        A process group of its own keeps a terminal's Ctrl-C from it: the supervisor ends it in order. Call this on the
        main thread, because the kernel kills it when the thread that started it ends.
        """
        process = await asyncio.create_subprocess_exec(
            # The working directory may hold a user's `server.py`.
            *(sys.executable, "-P", "-m", module),
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

    async def stop(self, timeout_s: float = KILL_S) -> None:
        """Send SIGTERM, and SIGKILL after `timeout_s`; return when it has ended."""
        self.terminate()
        try:
            await asyncio.wait_for(self.wait(), timeout_s)
        except TimeoutError:
            self.kill()
            await self.wait()
