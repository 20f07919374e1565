"""Clients that do not read: their replies give way to new connections, and what they leave unread is bounded."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from contextlib import ExitStack
from typing import Any

from server.web_server import NUM_RESERVED
from tests.server.helpers.web import Web, code_of, serving, talk
from tests.server.helpers.web_program import hello

HEALTH = b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n"
PIECE = bytes(64 << 10)


class Flood:
    """An application that answers `/` with a word, and `/TENANT` without end."""

    def __init__(self) -> None:
        self.num_open: Counter[str] = Counter()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        tenant = scope["path"][1:]
        if not tenant:
            await hello(scope, receive, send)
            return
        scope["state"]["tenant"] = tenant
        self.num_open[tenant] += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        sending = asyncio.create_task(endless(send))
        while (await receive())["type"] != "http.disconnect":
            pass
        sending.cancel()
        self.num_open[tenant] -= 1


async def endless(send: Any) -> None:
    while True:
        await send({"type": "http.response.body", "body": PIECE, "more_body": True})
        # Sending to a client that has left does not wait.
        await asyncio.sleep(0)


def never_reading(web: Web, stack: ExitStack, tenant: str) -> socket.socket:
    """Open a connection that asks for a reply and does not read it."""
    client = stack.enter_context(socket.socket())
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(web.address)
    client.sendall(f"GET /{tenant} HTTP/1.1\r\nHost: test\r\n\r\n".encode())
    return client


def test_stalled_replies_give_way_to_new_connections() -> None:
    async def what(web: Web) -> None:
        with ExitStack() as stack:
            for _ in range(8):
                never_reading(web, stack, "slow")
            status = 0
            while status != 200:
                status, _ = await web.ask()

    talk(what, Flood(), max_connections=8)


def test_an_orchestrator_is_answered_while_all_connections_are_busy() -> None:
    async def busy(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/health":
            while (await receive())["type"] != "http.disconnect":
                pass
        await hello(scope, receive, send)

    async def what(web: Web) -> None:
        held = [await web.connect(b"GET /busy HTTP/1.1\r\nHost: test\r\n\r\n") for _ in range(2)]
        await asyncio.sleep(0.1)
        held += [await web.connect() for _ in range(2 * NUM_RESERVED)]
        assert await web.ask(HEALTH) == (200, b"hello")
        assert code_of(await web.ask()) == (503, "overloaded")
        for _, writer in held:
            writer.close()

    talk(what, busy, max_connections=2)


def test_what_a_tenant_leaves_unread_is_bounded_and_hurts_no_other() -> None:
    flood = Flood()

    async def what(_: Web) -> None:
        async with serving(flood, 100, max_unsent=2 << 20) as web:
            with ExitStack() as stack:
                never_reading(web, stack, "modest")
                for _number in range(40):
                    never_reading(web, stack, "greedy")
                while flood.num_open != {"modest": 1, "greedy": 40}:
                    await asyncio.sleep(0.01)
                while flood.num_open["greedy"] == 40:
                    web.sweep(2.0)
                    await asyncio.sleep(0.01)
                # What a tenant may leave unread stays.
                assert flood.num_open["greedy"] > 0
                assert flood.num_open["modest"] == 1

    talk(what)
