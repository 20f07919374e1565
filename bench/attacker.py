"""Send the requests of one attack, in a process of its own, until the standard input closes.

`python -m bench.attacker` reads one JSON document: `url`, `kind`, `sizes`, the `keys` that connections take in
turn, and `interval_s`, the time from one request of all connections to the next, or 0 for as many as are answered. It
prints a line when it begins, and in the end one with the replies by status and code.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import httpx
import uvloop

from bench.attacks import Attack, Call, Sizes, attacks

REPLY_S = 120.0
# Requests of a connection that does not wait for the replies: as many as a server of uvicorn's keeps.
NUM_PIPELINED = 8
STATUS = re.compile(rb"HTTP/1\.1 (\d{3})")
# Between two requests of one connection, so that refusals alone do not fill the processors with the client's work.
PAUSE_S = 0.02
# A client that reads slowly reads so much once in so long: enough for a server that asks for 32 KiB a minute.
SIP_BYTES, SIP_S = 2 << 10, 3.0


@dataclass(slots=True)
class Sent:
    """The replies to an attack, and how long it ran."""

    replies: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def num_replies(self) -> int:
        return sum(self.replies.values())

    @property
    def interval_s(self) -> float:
        """The mean time from one request to the next."""
        return self.seconds / self.num_replies if self.num_replies else 0.0


@contextmanager
def attacking(
    attack: Attack, sizes: Sizes, url: str, keys: Sequence[str], interval_s: float = 0.0
) -> Iterator[Sent]:
    """Send the requests of an attack while the block runs; its value is complete after the block."""
    sent = Sent()
    order = {
        "url": url,
        "kind": attack.kind,
        "sizes": asdict(sizes),
        "keys": list(keys) if attack.tenant is not None else [],
        "interval_s": interval_s,
    }
    command = [sys.executable, "-m", "bench.attacker"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            print(json.dumps(order), file=process.stdin, flush=True)
            process.stdout.readline()
            started = time.perf_counter()
            yield sent
            process.stdin.close()
            sent.replies.update(json.loads(process.stdout.read()))
            sent.seconds = time.perf_counter() - started
        finally:
            process.kill()


def main() -> None:
    order = json.loads(sys.stdin.readline())
    attack = attacks(Sizes(**order["sizes"]))[order["kind"]]
    print(
        json.dumps(uvloop.run(_attack(attack, order["url"], order["keys"], order["interval_s"]))), flush=True
    )


async def _attack(attack: Attack, url: str, keys: Sequence[str], interval_s: float) -> Counter[str]:
    replies: Counter[str] = Counter()
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, over.set)
    print("sending", flush=True)
    async with contextlib.AsyncExitStack() as clients:
        pace, tasks = _Pace(interval_s), []
        for number in range(attack.num_connections):
            # One pool of hundreds of connections looks at each pair of them for each request, for most of a processor.
            http = await clients.enter_async_context(
                httpx.AsyncClient(base_url=url, timeout=REPLY_S, verify=False)
            )
            sender = _Client(http, attack, pace, replies)
            work = {"ask": sender.ask, "hold": sender.hold, "pipeline": sender.pipeline}[attack.manner]
            tasks.append(asyncio.create_task(work(number, _headers(keys, number))))
        await over.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPLY_S):
                # In a short run on a busy machine the first one may still be under way.
                while not replies:
                    await asyncio.sleep(PAUSE_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return replies


class _Pace:
    """Lets requests go at a rate; with 0, at once."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._next = time.perf_counter()

    async def wait(self) -> None:
        if self._interval_s:
            self._next = max(self._next, time.perf_counter() - 1.0) + self._interval_s
            await asyncio.sleep(max(0.0, self._next - time.perf_counter()))


@dataclass(frozen=True, slots=True)
class _Client:
    """Sends the requests of an attack, each connection with a key of its own or none."""

    http: httpx.AsyncClient
    attack: Attack
    pace: _Pace
    replies: Counter[str]

    async def ask(self, connection: int, key: dict[str, str]) -> None:
        """Send requests one after the other, each when the reply to the one before it has come."""
        number = connection
        while True:
            await self.pace.wait()
            call = self.attack.call(number)
            try:
                headers = {**key, **call.headers}
                reply = await self.http.request(call.method, call.path, headers=headers, content=call.body)
                self.replies[_outcome(reply)] += 1
            except httpx.TransportError as error:
                self.replies[type(error).__name__] += 1
            number += self.attack.num_connections
            await asyncio.sleep(PAUSE_S)

    async def hold(self, connection: int, key: dict[str, str]) -> None:
        """Send a request on a connection of its own, read next to nothing of the reply; begin again when it breaks."""
        where = self.http.base_url
        while True:
            await self.pace.wait()
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                # A small window, so that the reply stays with the server.
                reader, writer = await asyncio.open_connection(where.host, where.port, limit=SIP_BYTES)
                writer.write(4 * _raw(self.attack.call(connection), where.netloc, key))
                self.replies["connections"] += 1
                while data := await reader.read(SIP_BYTES):
                    if data.startswith(b"HTTP/1.1 503"):
                        self.replies["503"] += 1
                    await asyncio.sleep(SIP_S)
                writer.close()
            await asyncio.sleep(PAUSE_S)

    async def pipeline(self, connection: int, key: dict[str, str]) -> None:
        """Keep several requests under way on a connection of its own, and begin again when it breaks."""
        where = self.http.base_url
        request = _raw(self.attack.call(connection), where.netloc, key)
        while True:
            await self.pace.wait()
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(where.host, where.port)
                self.replies["connections"] += 1
                writer.write(NUM_PIPELINED * request)
                while data := await reader.read(1 << 16):
                    statuses = STATUS.findall(data)
                    self.replies.update(status.decode() for status in statuses)
                    await self.pace.wait()
                    writer.write(len(statuses) * request)
                writer.close()
            await asyncio.sleep(PAUSE_S)


def _raw(call: Call, netloc: bytes, key: Mapping[str, str]) -> bytes:
    headers = "".join(f"{name}: {value}\r\n" for name, value in {**key, **call.headers}.items())
    head = f"{call.method} {call.path} HTTP/1.1\r\nHost: {netloc.decode()}\r\n{headers}"
    return f"{head}Content-Length: {len(call.body)}\r\n\r\n".encode() + call.body


def _headers(keys: Sequence[str], connection: int) -> dict[str, str]:
    return {"X-API-Key": keys[connection % len(keys)]} if keys else {}


def _outcome(reply: httpx.Response) -> str:
    if not reply.is_error:
        return f"{reply.status_code} ok"
    try:
        return f"{reply.status_code} {reply.json()['error']['code']}"
    except ValueError:
        return str(reply.status_code)


if __name__ == "__main__":
    main()
