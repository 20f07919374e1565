"""The client of streamed replies: one request, read for the times of its tokens, or for its text and how it ended.

Times are seconds of `time.perf_counter`, which on Linux all processes of a machine share. Under load, streams are read
in a process of their own, which counts the events of tokens in the bytes of a reply and parses nothing else, so that it
takes as little as possible of the processors that the server needs. It imports no torch and no module of the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from typing import IO, TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import uvloop

if TYPE_CHECKING:
    import httpx

# The base's name in `POST /v1/completions`.
BASE = "base"


@dataclass(frozen=True, slots=True)
class Span:
    """A period of time."""

    began: float
    ended: float

    def holds(self, gap: Span) -> bool:
        return self.began <= gap.began and gap.ended <= self.ended

    def meets(self, gap: Span) -> bool:
        return self.began < gap.ended and gap.began < self.ended


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """When one stream was asked for, and when each of its tokens came."""

    begun: float
    tokens: list[float]

    @property
    def gaps(self) -> Iterator[Span]:
        """The time between each token and the next one."""
        return (Span(a, b) for a, b in pairwise(self.tokens))

    @property
    def first_token_s(self) -> float:
        return self.tokens[0] - self.begun


def tokens_per_s(streams: Sequence[StreamTimes]) -> float:
    """Return the rate of all tokens, from the first request to the last token."""
    seconds = max(one.tokens[-1] for one in streams) - min(one.begun for one in streams)
    return sum(len(one.tokens) for one in streams) / seconds


def gap_seconds(streams: Iterable[StreamTimes]) -> list[float]:
    return [gap.ended - gap.began for one in streams for gap in one.gaps]


def gaps_within(streams: Iterable[StreamTimes], spans: Sequence[Span]) -> list[float]:
    """Return the seconds of the gaps that lie in one of `spans`."""
    return [
        gap.ended - gap.began for one in streams for gap in one.gaps if any(span.holds(gap) for span in spans)
    ]


def gaps_meeting(streams: Iterable[StreamTimes], spans: Sequence[Span]) -> list[float]:
    """Return the seconds of the gaps that share time with one of `spans`."""
    return [
        gap.ended - gap.began for one in streams for gap in one.gaps if any(span.meets(gap) for span in spans)
    ]


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

    @property
    def path(self) -> str:
        if self.schema is not None:
            return "/v1/completions"
        return "/generate" + (f"?variant={self.variant}" if self.variant else "")

    def body(self) -> dict[str, Any]:
        """Return the document that is sent."""
        body: dict[str, Any] = {"prompt": self.prompt, "temperature": 0, "stream": True}
        if self.schema is None:
            return {**body, "max_new_tokens": self.num_new}
        body |= {"model": self.variant or BASE, "max_tokens": self.num_new}
        if self.schema:
            json_schema = {"name": "output", "schema": self.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": json_schema}
        return body

    def to_bytes(self, host: str) -> bytes:
        """Return the HTTP request, head and body."""
        content = json.dumps(self.body()).encode()
        head = f"POST {self.path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json"
        if self.key is not None:
            head += f"\r\nAuthorization: Bearer {self.key}"
        return f"{head}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """One stream that was read to its end.

    Args:
        outcome: done, error (an event), cut off, incomplete (no event says that it is the end), or refused (with the
            status).
    """

    times: StreamTimes
    ended: float
    outcome: str
    data: Sequence[str] = ()  # of its events, JSON

    @property
    def text(self) -> str:
        return "".join(json.loads(one).get("text", "") for one in self.data)


def read_stream(client: httpx.Client, request: StreamedRequest) -> StreamEnd:
    """Send a request to `POST /generate` and read its stream to the end, however it ends."""
    # Deferred, because the process of clients under load does without.
    import httpx

    times, data, event, outcome = StreamTimes(time.perf_counter(), []), list[str](), "", ""
    try:
        with client.stream("POST", request.path, json=request.body()) as reply:
            if reply.is_error:
                return StreamEnd(times, time.perf_counter(), f"refused with {reply.status_code}")
            for line in reply.iter_lines():
                key, _, value = line.partition(": ")
                if key == "event":
                    event = value
                    if event == "token":
                        times.tokens.append(time.perf_counter())
                elif key == "data":
                    data.append(value)
    except httpx.TransportError:
        outcome = "cut off"
    outcome = outcome or (event if event in ("done", "error") else "incomplete")
    return StreamEnd(times, time.perf_counter(), outcome, data)


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
    command = [sys.executable, "-m", "bench.client"]
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
