"""HTTP clients that read streams, in a process of their own: the child's program, and the parent's side of it.

The child counts the events of tokens in the bytes of a reply and parses nothing else, so that it takes as little as
possible of the processors that the server needs. It imports no torch and no module of the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import IO, Any, cast
from urllib.parse import urlsplit

import uvloop

from bench.streams import StreamTimes

# The base's name in `POST /v1/completions`.
BASE = "base"


@dataclass(frozen=True, slots=True)
class Markers:
    """Bytes that a stream has once per token, and once at its end."""

    token: bytes
    done: bytes


OF_GENERATE = Markers(b"event: token\n", b"event: done\n")
OF_COMPLETIONS = Markers(b'"finish_reason":null', b"data: [DONE]\n")


@dataclass(frozen=True, slots=True)
class StreamedRequest:
    """A body for `POST /generate`, or with a schema for `POST /v1/completions`, whose reply is streamed."""

    prompt: str
    num_new: int
    variant: str | None = None
    # The JSON schema of the output; an empty one leaves it free.
    schema: dict[str, Any] | None = None
    # An API key.
    key: str | None = None

    @property
    def markers(self) -> Markers:
        return OF_GENERATE if self.schema is None else OF_COMPLETIONS

    def to_bytes(self, host: str) -> bytes:
        """Return the HTTP request, head and body."""
        body: dict[str, Any] = {"prompt": self.prompt, "temperature": 0, "stream": True}
        if self.schema is None:
            path = "/generate" + (f"?variant={self.variant}" if self.variant else "")
            body["max_new_tokens"] = self.num_new
        else:
            path = "/v1/completions"
            body |= {"model": self.variant or BASE, "max_tokens": self.num_new}
            if self.schema:
                json_schema = {"name": "output", "schema": self.schema}
                body["response_format"] = {"type": "json_schema", "json_schema": json_schema}
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json"
        if self.key is not None:
            head += f"\r\nAuthorization: Bearer {self.key}"
        return f"{head}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


@dataclass(frozen=True, slots=True)
class ReadStreams:
    """All streams that a process of clients has read, and its processor time without that of its start."""

    streams: list[StreamTimes]
    cpu_s: float


@dataclass(slots=True)
class RunningClients:
    """A process of clients whose streams run."""

    _process: subprocess.Popen[str]
    _input: IO[str]
    _output: IO[str]

    def wait_for_first_tokens(self) -> None:
        """Wait until every stream has a token."""
        self._line()

    def stop(self) -> ReadStreams:
        """Close all streams that have not ended, and return what was read."""
        self._input.close()
        return self.wait()

    def wait(self) -> ReadStreams:
        """Wait for the end of all streams."""
        found = json.loads(self._line())
        return ReadStreams([StreamTimes(**one) for one in found["streams"]], found["cpu_s"])

    def _line(self) -> str:
        if line := self._output.readline():
            return line
        raise RuntimeError(f"the clients ended with {self._process.wait()}: see their error above")


@contextmanager
def running_clients(url: str, requests: Sequence[StreamedRequest]) -> Iterator[RunningClients]:
    """Send all requests at once, each on a connection of its own, from a new process."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "bench.http.clients"]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        sent, received = process.stdin, process.stdout
        assert sent is not None
        assert received is not None
        try:
            print(
                json.dumps({"url": url, "requests": [asdict(one) for one in requests]}), file=sent, flush=True
            )
            clients = RunningClients(process, sent, received)
            yield clients
        finally:
            process.kill()


def read_streams(url: str, requests: Sequence[StreamedRequest]) -> ReadStreams:
    """Send all requests at once and read their streams to the end."""
    with running_clients(url, requests) as clients:
        clients.wait_for_first_tokens()
        return clients.wait()


@dataclass(slots=True)
class StreamReader(asyncio.Protocol):
    """Sends one request and notes when each token comes."""

    request: bytes
    markers: Markers
    first: asyncio.Future[None]
    ended: asyncio.Future[None]
    begun: float = 0.0
    tokens: list[float] = field(default_factory=list)
    _seen: bytes = b""
    _transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self.begun = time.perf_counter()
        self._transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        seen = self._seen + data
        self.tokens += [now] * seen.count(self.markers.token)
        # A reply without tokens is an error, and is kept for the message. Otherwise so much is kept that a marker that
        # two reads divide is found, and none is found twice.
        self._seen = seen[1 - len(self.markers.token) :] if self.tokens else seen
        if self.tokens and not self.first.done():
            self.first.set_result(None)
        if self.markers.done in seen:
            self.close()

    def close(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
        if self._transport is not None:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        for future in (self.first, self.ended):
            if not future.done():
                future.set_exception(RuntimeError(f"a stream ended early: {exc or self._seen!r}"))


def main() -> None:
    document = json.loads(sys.stdin.readline())
    requests = [StreamedRequest(**one) for one in document["requests"]]
    uvloop.run(_read_all(document["url"], requests))


async def _read_all(url: str, requests: Sequence[StreamedRequest]) -> None:
    """Send all requests; print a line at the first tokens, and one when all streams have ended or the input has."""
    imported_s = time.process_time()
    loop, where = asyncio.get_running_loop(), urlsplit(url)
    readers = [
        StreamReader(one.to_bytes(where.netloc), one.markers, loop.create_future(), loop.create_future())
        for one in requests
    ]
    host, port = str(where.hostname), where.port or 80
    # A connection's protocol is what its factory returns: the reader itself.
    await asyncio.gather(*(loop.create_connection(partial(_itself, one), host, port) for one in readers))
    await asyncio.gather(*(reader.first for reader in readers))
    print("first tokens", flush=True)
    loop.add_reader(sys.stdin, _close, readers)
    await asyncio.gather(*(reader.ended for reader in readers))
    streams = [{"begun": reader.begun, "tokens": reader.tokens} for reader in readers]
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps({"cpu_s": time.process_time() - imported_s, "streams": streams}), flush=True)


def _itself(reader: StreamReader) -> StreamReader:
    return reader


def _close(readers: Sequence[StreamReader]) -> None:
    for reader in readers:
        reader.close()


if __name__ == "__main__":
    main()
