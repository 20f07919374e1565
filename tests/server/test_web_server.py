"""Bad connections over real sockets: half-open, silent, too many, too large, never reading."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from server.processes import raise_descriptor_limit
from server.web_server import FREE_CHUNKS, MAX_PIPELINED, MIN_CHUNK_BYTES
from tests.server.helpers.live_server import ROOT, WAIT_S
from tests.server.helpers.web import Web, answer, code_of, serving, talk
from tests.server.helpers.web_program import hello

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
HALF = b"GET / HTTP/1.1\r\nHost: te"
# Longer than every deadline of a connection that waits.
LATE_S = 100.0


def test_replies_are_sent_without_delay() -> None:
    delays = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for task in asyncio.all_tasks():
            coroutine: Any = task.get_coro()
            if coroutine is not None and coroutine.__qualname__.endswith("run_asgi"):
                transport = coroutine.cr_frame.f_locals["self"].transport
                delays.append(
                    transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                )
        await hello(scope, receive, send)

    async def what(web: Web) -> None:
        assert await web.ask() == (200, b"hello")

    talk(what, app)
    assert delays == [1]


def test_half_a_head_is_answered_with_a_timeout() -> None:
    async def what(web: Web) -> None:
        reader, writer = await web.connect(HALF)
        await web.ask()
        web.sweep(LATE_S)
        assert code_of(await answer(reader)) == (408, "request_timeout")
        assert await reader.read() == b""
        writer.close()

    talk(what)


def test_a_head_that_trickles_is_late_all_the_same() -> None:
    async def what(web: Web) -> None:
        reader, writer = await web.connect(HALF)
        await web.ask()
        writer.write(b"s")
        await web.ask()
        web.sweep(15.0)
        assert code_of(await answer(reader)) == (408, "request_timeout")
        writer.close()

    talk(what)


def test_an_idle_connection_is_closed_without_a_reply() -> None:
    async def what(web: Web) -> None:
        silent, silent_writer = await web.connect()
        kept, kept_writer = await web.connect(GET)
        assert await answer(kept) == (200, b"hello")
        web.sweep(30.0)
        assert await web.ask() == (200, b"hello")
        kept_writer.write(GET)
        assert await answer(kept) == (200, b"hello")
        web.sweep(LATE_S)
        assert await silent.read() == await kept.read() == b""
        silent_writer.close()
        kept_writer.close()

    talk(what)


def test_a_connection_that_waits_gives_way_to_a_new_one() -> None:
    async def what(web: Web) -> None:
        waiting = [await web.connect(HALF) for _ in range(10)]
        for _ in range(5):
            assert await web.ask() == (200, b"hello")
        assert await waiting[0][0].read() == b""
        for _, writer in waiting:
            writer.close()

    talk(what, max_connections=4)


@pytest.mark.parametrize(
    "rest", [b"a:b\r\n", b"c" * 1000, b"1;" + b"e" * 1000], ids=["fields", "one", "extension"]
)
def test_what_stands_in_a_body_beside_its_bytes_is_bounded_and_no_part_of_the_head(rest: bytes) -> None:
    heads: list[list[Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        heads.append(scope["headers"])
        while (await receive())["type"] != "http.disconnect":
            pass

    async def what(web: Web) -> None:
        begin = b"0\r\n" if b";" not in rest else b""
        head = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + begin
        reader, writer = await web.connect(head + (b"name: " if rest[:1] == b"c" else b""))
        num_sent = 0
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof():
                assert num_sent < 4 << 20
                writer.write(rest)
                await writer.drain()
                await asyncio.sleep(0)
                num_sent += len(rest)
        writer.close()
        assert [len(head) for head in heads] == [2]

    talk(what, app)


@pytest.mark.parametrize("coding", ["xchunked", "gzip", "gzip, chunked", "chunked, chunked", "identity", ""])
@pytest.mark.parametrize("rest", [b"", 20 * GET], ids=["alone", "pipelined"])
def test_a_body_of_a_transfer_coding_that_is_not_known_is_refused_at_once(coding: str, rest: bytes) -> None:
    async def what(web: Web) -> None:
        head = f"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: {coding}\r\n\r\n".encode()
        assert code_of(await web.ask(head + rest)) == (400, "invalid_request")

    talk(what)


def test_a_body_in_chunks_with_short_extensions_is_read() -> None:
    bodies: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        bodies.append(body)
        await hello(scope, receive, send)

    async def what(web: Web) -> None:
        head = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: Chunked\r\n\r\n"
        reader, writer = await web.connect(head)
        for part in (b"2;" + b"e" * 2000, b"\r\nab\r\n", b"1;x=y\r\nc\r\n", b"0\r\nname: value\r\n\r\n"):
            writer.write(part)
            await web.ask()
        assert await answer(reader) == (200, b"hello")
        writer.close()
        assert b"abc" in bodies

    talk(what, app)


@pytest.mark.parametrize("wrong", [b"1;" + b"e" * (5 << 10), b"xyz\r\n"], ids=["a long extension", "no size"])
def test_wrong_chunks_are_refused_while_the_application_waits_for_the_body(wrong: bytes) -> None:
    ended = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while scope["method"] == "POST" and (await receive())["type"] != "http.disconnect":
            pass
        if scope["method"] == "POST":
            ended.set()
        await hello(scope, receive, send)

    async def what(web: Web) -> None:
        head = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n"
        reader, writer = await web.connect(head)
        await web.ask()
        for start in range(0, len(wrong), 1 << 10):
            writer.write(wrong[start : start + (1 << 10)])
            await web.ask()
        assert code_of(await answer(reader)) == (400, "invalid_request")
        assert await reader.read() == b""
        await ended.wait()
        writer.close()

    talk(what, app)


@pytest.mark.parametrize("reads_body", [True, False], ids=["read", "answered before"])
def test_a_body_of_many_small_chunks_is_refused(reads_body: bool) -> None:
    """Each takes as long to read as a kilobyte: a client that sends 10 MB/s of them would have the event loop."""
    num_read = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal num_read
        waits = reads_body and scope["method"] == "POST"
        while waits and (message := await receive())["type"] != "http.disconnect":
            num_read += len(message["body"])
        await hello(scope, receive, send)

    async def what(web: Web) -> None:
        head = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        reader, writer = await web.connect(head)
        if not reads_body:
            assert await answer(reader) == (200, b"hello")
        for num_chunks in (FREE_CHUNKS, FREE_CHUNKS // MIN_CHUNK_BYTES + 1):
            writer.write(b"1\r\na\r\n" * num_chunks)
            await web.ask()
        if reads_body:
            assert code_of(await answer(reader)) == (400, "invalid_request")
        assert await reader.read() == b""
        writer.close()

    talk(what, app)
    assert num_read <= FREE_CHUNKS + FREE_CHUNKS // MIN_CHUNK_BYTES


def test_a_body_may_have_as_many_chunks_of_usual_size_as_it_has() -> None:
    num_chunks, num_read = 3 * FREE_CHUNKS, 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal num_read
        more = True
        while more:
            message = await receive()
            num_read, more = num_read + len(message["body"]), message["more_body"]
        await hello(scope, receive, send)

    async def what(web: Web) -> None:
        head = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        chunk = b"%x\r\n%b\r\n" % (MIN_CHUNK_BYTES, b"a" * MIN_CHUNK_BYTES)
        assert await web.ask(head + num_chunks * chunk + b"0\r\n\r\n") == (200, b"hello")

    talk(what, app)
    assert num_read == num_chunks * MIN_CHUNK_BYTES


def test_requests_that_are_not_waited_for_are_bounded() -> None:
    num_calls = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        await hello(scope, receive, send)

    async def what(web: Web) -> None:
        reader, writer = await web.connect(MAX_PIPELINED * GET)
        assert [await answer(reader) for _ in range(MAX_PIPELINED)] == [(200, b"hello")] * MAX_PIPELINED
        writer.write(1000 * GET)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        assert num_calls < 3 * MAX_PIPELINED
        writer.close()

    talk(what, app)


def test_a_head_has_a_bounded_number_of_fields() -> None:
    async def what(web: Web) -> None:
        assert code_of(await web.ask(GET[:-2] + 1000 * b"a:\r\n" + b"\r\n")) == (431, "invalid_request")
        assert await web.ask(GET[:-2] + 200 * b"a:\r\n" + b"\r\n") == (200, b"hello")

    talk(what)


def test_a_connection_beyond_the_bound_is_told_so_while_all_others_are_served() -> None:
    async def what(web: Web) -> None:
        release = asyncio.Event()
        entered = 0

        async def app(scope: Any, receive: Any, send: Any) -> None:
            nonlocal entered
            entered += 1
            await release.wait()
            await hello(scope, receive, send)

        async with serving(app, 2) as small:
            asking = [asyncio.create_task(small.ask()) for _ in range(2)]
            while entered < 2:
                await asyncio.sleep(0.01)
            assert code_of(await small.ask()) == (503, "overloaded")
            release.set()
            assert await asyncio.gather(*asking) == [(200, b"hello")] * 2
            assert await small.ask() == (200, b"hello")

    talk(what)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * (1 << 20),
        b"GET / HTTP/1.1\r\nX: " + b"a" * (1 << 20),
        b"GET / HTTP/1.1" + b"\r\nX: a" * (1 << 18),
    ],
    ids=["target", "field", "fields"],
)
def test_a_head_without_end_is_refused(head: bytes) -> None:
    async def what(web: Web) -> None:
        assert code_of(await web.ask(head)) == (431, "invalid_request")

    talk(what)


@pytest.mark.parametrize(
    "first", [b"\x16\x03\x01 TLS", b"GET \xff HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\n a\r\n\r\n"]
)
def test_bytes_that_are_no_http_are_refused_in_the_shape_of_errors(first: bytes) -> None:
    async def what(web: Web) -> None:
        assert code_of(await web.ask(first)) == (400, "invalid_request")

    talk(what)


def test_a_request_to_upgrade_is_answered_as_a_plain_one() -> None:
    async def what(web: Web) -> None:
        upgrade = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        assert await web.ask(upgrade) == (200, b"hello")

    talk(what)


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the path, what the head asks for and the body."""
    body, more = b"", True
    while more:
        message = await receive()
        assert message["type"] == "http.request"
        body, more = body + message["body"], message["more_body"]
    asked = dict(scope["headers"]).get(b"upgrade", b"-")
    reply = scope["path"].encode() + b" " + asked + b" " + body
    head = [(b"content-length", str(len(reply)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": reply})


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"TLS/1.0"])
def test_bodies_behind_a_request_to_upgrade_are_read_and_requests_behind_them_are_answered(
    protocol: bytes, size: int
) -> None:
    ask = (
        b" HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: "
        + protocol
        + b"\r\n"
    )
    sent = (
        b"POST /length" + ask + b"Content-Length: 5\r\n\r\nhello"
        b"POST /chunks"
        + ask
        + b"Transfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\nTrailer: a\r\n\r\n"
        b"POST /empty" + ask + b"Content-Length: 0\r\n\r\n"
        b"GET /none" + ask + b"\r\n"
        b"GET /plain HTTP/1.1\r\nHost: localhost\r\n\r\n"
    )

    async def what(web: Web) -> None:
        reader, writer = await web.connect()
        for begin in range(0, len(sent), size):
            writer.write(sent[begin : begin + size])
            await writer.drain()
            await asyncio.sleep(0)
        replies = [await answer(reader) for _ in range(5)]
        assert replies == [
            (200, b"/length " + protocol + b" hello"),
            (200, b"/chunks " + protocol + b" hello"),
            (200, b"/empty " + protocol + b" "),
            (200, b"/none " + protocol + b" "),
            (200, b"/plain - "),
        ]
        writer.close()

    talk(what, echo)


def test_half_a_body_behind_a_request_to_upgrade_is_late_as_any() -> None:
    async def what(web: Web) -> None:
        head = b"POST / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 9\r\n\r\n"
        reader, writer = await web.connect(head + b"half")
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()

    talk(what, echo)


def test_the_rest_of_a_refused_body_is_awaited_only_for_a_while() -> None:
    async def what(web: Web) -> None:
        reader, writer = await web.connect(
            b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
        )
        assert await answer(reader) == (200, b"hello")
        writer.write(b"a" * 1000)
        await web.ask()
        web.sweep(20.0)
        assert await reader.read() == b""
        writer.close()

    talk(what)


def test_a_client_that_never_reads_is_cut_off() -> None:
    ended = asyncio.Event()

    async def flood(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        sending = asyncio.create_task(endless(send))
        assert (await receive())["type"] == "http.disconnect"
        sending.cancel()
        ended.set()

    async def endless(send: Any) -> None:
        while True:
            await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})

    async def what(web: Web) -> None:
        _, writer = await web.connect(GET)
        while not ended.is_set():
            web.sweep(LATE_S)
            await asyncio.sleep(0.05)
        writer.close()

    talk(what, flood)


def test_a_client_that_leaves_ends_its_first_of_two_pipelined_requests() -> None:
    ended = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        ended.set()

    async def what(web: Web) -> None:
        _, writer = await web.connect(GET + GET)
        await asyncio.sleep(0.1)
        writer.close()
        await ended.wait()

    talk(what, app)


def test_a_body_without_its_end_does_not_hold_up_the_end_of_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    with ExitStack() as stack:

        async def what(web: Web) -> None:
            raw = stack.enter_context(socket.create_connection(web.address))
            raw.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\na")
            await asyncio.sleep(0.1)

        talk(what, app)
    # uvicorn logs the requests that it cancels.
    assert not caplog.records


def test_bad_connections_are_logged_together(caplog: pytest.LogCaptureFixture) -> None:
    async def what(web: Web) -> None:
        for _ in range(50):
            await web.ask(b"no http\r\n\r\n")
        web.sweep(LATE_S)

    with caplog.at_level(logging.INFO, "server"):
        talk(what)
    assert sum("sent no valid HTTP" in record.message for record in caplog.records) <= 2
    assert not any(record.exc_info for record in caplog.records)


@contextmanager
def half_open(port: int, number: int) -> Iterator[None]:
    """Hold connections that have sent half of a request's head."""
    with ExitStack() as stack:
        for _ in range(number):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=WAIT_S))
            client.sendall(HALF)
        yield


def test_a_server_with_fewer_descriptors_than_half_open_connections_answers() -> None:
    if raise_descriptor_limit() < 2000:
        pytest.skip("this test opens more descriptors than it may here")
    program = [sys.executable, "-m", "tests.server.helpers.web_program"]
    process = subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        port = int(process.stdout.readline())
        with half_open(port, 1100):
            for _ in range(20):
                assert httpx.get(f"http://127.0.0.1:{port}/", timeout=WAIT_S).text == "hello"
        process.terminate()
        process.wait(WAIT_S)
        assert len(process.stderr.read()) < 1000
    finally:
        process.kill()
        process.communicate()
