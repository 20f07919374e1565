"""Read the bytes of a streamed reply as the clients of benches do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from bench.http.clients import OF_GENERATE, StreamedRequest, StreamReader

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
