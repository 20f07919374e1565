"""Read streamed replies as the client of benches does, and make figures of the times of their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest

from bench.client import (
    OF_GENERATE,
    Span,
    StreamedRequest,
    StreamReader,
    StreamTimes,
    gaps_meeting,
    gaps_within,
    read_stream,
    tokens_per_s,
)

REPLY = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    b'2f\r\nevent: token\ndata: {"index": 0, "text": "event: token"}\n\n\r\n'
    b"18\r\nevent: token\ndata: {}\n\n\r\n"
    b"17\r\nevent: done\ndata: {}\n\n\r\n0\r\n\r\n"
)


def read(feed: Callable[[StreamReader], None]) -> StreamReader:
    """Feed a reader on a running loop, and return it once its stream has ended."""

    async def run() -> StreamReader:
        loop = asyncio.get_running_loop()
        reader = StreamReader(b"", OF_GENERATE, loop.create_future(), loop.create_future())
        feed(reader)
        await asyncio.gather(reader.first, reader.ended)
        return reader

    return asyncio.run(run())


@pytest.mark.parametrize("size", [1, 7, 12, 13, len(REPLY)])
def test_each_token_is_counted_once_however_the_bytes_are_divided(size: int) -> None:
    def feed(reader: StreamReader) -> None:
        for start in range(0, len(REPLY), size):
            reader.data_received(REPLY[start : start + size])

    assert len(read(feed).tokens) == 2


def test_a_stream_that_ends_early_is_an_error_with_the_reply() -> None:
    def feed(reader: StreamReader) -> None:
        reader.data_received(b'HTTP/1.1 503 Service Unavailable\r\n\r\n{"error": "draining"}')
        reader.connection_lost(None)

    with pytest.raises(RuntimeError, match="draining"):
        read(feed)


def test_a_request_names_its_variant_and_the_length_of_its_body() -> None:
    sent = StreamedRequest("w1", num_new=3, variant="v2").to_bytes("localhost:8000")
    head, _, body = sent.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /generate?variant=v2 HTTP/1.1\r\nHost: localhost:8000\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert b'"stream": true' in body


def test_a_request_of_a_tenant_brings_its_key() -> None:
    head, _, _ = StreamedRequest("w1", num_new=3, key="pxk_id_secret").to_bytes("host").partition(b"\r\n\r\n")
    assert b"\r\nAuthorization: Bearer pxk_id_secret\r\n" in head
    assert b"Authorization" not in StreamedRequest("w1", num_new=3).to_bytes("host")


STREAM = StreamTimes(begun=0.0, tokens=[1.0, 2.0, 4.0, 7.0])


def test_only_gaps_that_lie_in_a_span_are_within_it() -> None:
    assert gaps_within([STREAM], [Span(1.5, 7.0)]) == [2.0, 3.0]


def test_a_gap_meets_a_span_that_lies_inside_it() -> None:
    assert gaps_meeting([STREAM], [Span(2.5, 2.6), Span(2.7, 3.0)]) == [2.0]


def test_the_rate_counts_from_the_first_request_to_the_last_token() -> None:
    assert tokens_per_s([STREAM, StreamTimes(0.5, [8.0])]) == pytest.approx(5 / 8)


TOKEN, DONE = 'event: token\ndata: {"text": "w1 "}\n\n', "event: done\ndata: {}\n\n"


def client_of(status: int, body: str) -> httpx.Client:
    """Return a client of a server that answers every request alike."""
    return httpx.Client(
        transport=httpx.MockTransport(lambda _: httpx.Response(status, text=body)), base_url="http://test"
    )


@pytest.mark.parametrize(
    ("status", "body", "outcome"),
    [
        (200, 2 * TOKEN + DONE, "done"),
        (200, 2 * TOKEN + "event: error\ndata: {}\n\n", "error"),
        (200, 2 * TOKEN, "incomplete"),
        (503, "{}", "refused with 503"),
    ],
)
def test_a_stream_is_read_to_its_end_however_it_ends(status: int, body: str, outcome: str) -> None:
    found = read_stream(client_of(status, body), StreamedRequest("w1", 2))
    assert found.outcome == outcome
    assert (found.text, len(found.times.tokens)) == (("w1 w1 ", 2) if status == 200 else ("", 0))
    assert found.times.begun <= found.ended


def test_a_connection_that_breaks_cuts_a_stream_off() -> None:
    def breaks(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("reset", request=request)

    client = httpx.Client(transport=httpx.MockTransport(breaks), base_url="http://test")
    assert read_stream(client, StreamedRequest("w1", 2)).outcome == "cut off"
