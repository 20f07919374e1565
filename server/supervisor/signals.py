"""Turns the signals that end a server into exit codes."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

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
