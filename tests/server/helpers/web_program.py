"""A program that serves one small ASGI application with at most 1,024 file descriptors, for tests of bad connections.

It prints its port and writes to standard error what a server would log.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any

from server.fairness import FairBudget
from server.metrics.metrics import FrontendMetrics
from server.processes import listen
from server.tenants.loop_ledger import LoopLedger, Turns
from server.web_server import WebServer, make_connections, run_event_loop

NUM_DESCRIPTORS = 1024


async def hello(scope: Any, receive: Any, send: Any) -> None:
    """Answer every request with one word."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


async def main() -> None:
    with listen("127.0.0.1", 0) as listening:
        turns = Turns(LoopLedger(FrontendMetrics().tenant_seconds_total), lambda _: "default")
        public, _ = make_connections(4096, FairBudget(1 << 30, "unsent bytes"), turns, has_keys=False)
        server = WebServer(hello, public, lifespan=False)
        print(listening.getsockname()[1], flush=True)
        await asyncio.create_task(server.serve([listening]))


if __name__ == "__main__":
    logging.basicConfig()
    resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_DESCRIPTORS, NUM_DESCRIPTORS))
    run_event_loop(main())
