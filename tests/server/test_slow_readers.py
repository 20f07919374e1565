"""Clients that do not read: their replies give way to new connections, and what they leave unread is bounded."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from server.connections import NUM_RESERVED
from tests.server.helpers.live_server import WAIT_S, LiveServer, live_server
from tests.server.helpers.served import make_family
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


# Megabytes of events, where a connection's buffers hold a few.
LONG = {
    "model": "base",
    "prompt": "a",
    "max_tokens": 200,
    "n": 128,
    "temperature": 2.0,
    "seed": 1,
    "logprobs": 20,
    "stream": True,
}
TOKENS = re.compile(r"^peraxis_generation_tokens_total (\S+)$", re.MULTILINE)


def texts_of(lines: Iterable[str]) -> dict[int, list[str]]:
    """Return the pieces of text of a stream's sequences by their indices; the stream must have ended well."""
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    choices = [choice for event in data for choice in json.loads(event)["choices"]]
    texts: dict[int, list[str]] = {}
    for choice in choices:
        texts.setdefault(choice["index"], []).append(choice["text"])
    return texts


def num_generated(server: LiveServer) -> float:
    """Return how many tokens the engine has generated when it has answered one more request, of one token."""
    body = {"model": "base", "prompt": "b", "max_tokens": 1, "temperature": 0}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=WAIT_S).raise_for_status()
    (number,) = TOKENS.findall(httpx.get(f"{server.url}/metrics", timeout=WAIT_S).text)
    return float(number)


def test_a_stream_that_is_not_read_pauses_and_is_whole_when_it_is_read(tmp_path: Path) -> None:
    base = make_family(tmp_path / "family", seed=5, num_variants=0).base
    with live_server(base, tmp_path / "registry", "--kv-cache-gb", 0.2) as server:
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=LONG, timeout=WAIT_S) as reply:
            wanted = texts_of(reply.iter_lines())
        num_tokens = before = num_generated(server)
        body = json.dumps(LONG).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(WAIT_S)
            client.connect((httpx.URL(url).host, httpx.URL(url).port))
            client.sendall(head.encode() + body)
            # Until a look generates one token, and nothing else is generated any more.
            while (now := num_generated(server)) != before + 1 or now < num_tokens + 1000:
                before = now
            assert now < 1.5 * num_tokens
            unread = bytearray()
            while data := client.recv(1 << 20):
                unread += data
        # Chunks end between events.
        found = texts_of(line for line in unread.decode().splitlines())
        assert found.keys() == wanted.keys()
        # A batch of another size rounds otherwise: a draw at the edge of two tokens may fall on the other one.
        assert sum(found[index] == wanted[index] for index in wanted) >= 0.9 * len(wanted)
