"""How many connections, and heads of callers without a key, a turn of the event loop takes."""

from __future__ import annotations

import asyncio
import errno
import itertools
import socket
import time
from contextlib import ExitStack
from functools import partial
from unittest import mock

import pytest

from server import connections
from server.connections import MAX_UNREAD_BYTES, READING_S, Listener, ReadingTurns
from server.processes import listen
from server.tenants.loop_ledger import NOBODY, Headers
from server.web_server import run_event_loop
from tests.server.helpers.live_server import WAIT_S
from tests.server.helpers.web import GET, Web, answer, make_turns, talk

# As many as ten turns take here: fewer than by default, because each takes two descriptors of this process.
PER_TURN = 8
NUM_AT_ONCE = 10 * PER_TURN


@pytest.fixture(autouse=True)
def few_per_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "ACCEPTED_PER_TURN", PER_TURN)
    monkeypatch.setattr(connections, "READ_PER_TURN", PER_TURN)


def test_a_turn_of_the_event_loop_accepts_a_few_of_the_connections_that_have_arrived() -> None:
    async def what(web: Web) -> None:
        counts, total = list[int](), 0
        with (
            ExitStack() as opened,
            mock.patch.object(web.connections, "admit", wraps=web.connections.admit) as admit,
        ):
            # The kernel completes them while the event loop stands.
            for _ in range(NUM_AT_ONCE):
                opened.enter_context(socket.create_connection(web.address))
            while total < NUM_AT_ONCE:
                await asyncio.sleep(0)
                counts.append(admit.call_count - total)
                total = admit.call_count
            assert max(counts) <= PER_TURN
            # They are served all the same, and so are those behind them.
            assert await web.ask() == (200, b"hello")

    talk(what, max_connections=2 * NUM_AT_ONCE)


def test_requests_under_way_go_on_between_connections_that_arrive_at_once() -> None:
    async def what(web: Web) -> None:
        reader, writer = await web.connect(GET)
        assert await answer(reader) == (200, b"hello")
        with (
            ExitStack() as opened,
            mock.patch.object(web.connections, "admit", wraps=web.connections.admit) as admit,
        ):
            for _ in range(NUM_AT_ONCE):
                opened.enter_context(socket.create_connection(web.address))
            writer.write(GET)
            assert await answer(reader) == (200, b"hello")
            assert admit.call_count < NUM_AT_ONCE
        writer.close()

    talk(what, max_connections=2 * NUM_AT_ONCE)


@pytest.mark.parametrize("key", [None, "tenant"])
def test_a_turn_of_the_event_loop_reads_a_few_heads_of_callers_without_a_key(key: str | None) -> None:
    num_read = 0

    def owner_of(headers: Headers) -> str:
        nonlocal num_read
        num_read += 1
        return dict(headers).get(b"x-api-key", NOBODY.encode()).decode()

    async def what(web: Web) -> None:
        nonlocal num_read
        head = GET if key is None else GET.replace(b"\r\n\r\n", f"\r\nX-API-Key: {key}\r\n\r\n".encode())
        opened = [await web.connect() for _ in range(NUM_AT_ONCE)]
        counts, total, num_read = list[int](), 0, 0
        for _, writer in opened:
            # Written at once, while no turn of the event loop reads.
            writer.write(head)
        while total < NUM_AT_ONCE:
            await asyncio.sleep(0)
            counts.append(num_read - total)
            total = num_read
        # Without a key it is not known whose they are, before they are read.
        assert max(counts) <= PER_TURN
        assert [await answer(reader) for reader, _ in opened] == [(200, b"hello")] * NUM_AT_ONCE
        for _, writer in opened:
            writer.write(head)
        # Now it is.
        while num_read < 2 * NUM_AT_ONCE:
            await asyncio.sleep(0)
            counts.append(num_read - total)
            total = num_read
        assert (max(counts) > PER_TURN) == (key is not None)
        for _, writer in opened:
            writer.close()

    talk(what, max_connections=2 * NUM_AT_ONCE, has_keys=True, turns=make_turns(owner_of))


def test_what_came_last_is_read_first_and_what_is_too_much_not_at_all() -> None:
    async def main() -> None:
        reading, order = ReadingTurns(), list[int]()
        while reading.begin():
            pass
        for number in range(3 * PER_TURN):
            assert reading.wait(number, 100, partial(order.append, number))
        assert not reading.wait("large", MAX_UNREAD_BYTES, order.clear)
        reading.leave(1)
        for num_turns in range(1, 4):
            await asyncio.sleep(0)
            assert len(order) == min(num_turns * PER_TURN, 3 * PER_TURN - 1)
        assert order == [number for number in reversed(range(3 * PER_TURN)) if number != 1]
        # Nothing waits any more.
        assert reading.wait("large", MAX_UNREAD_BYTES, order.clear)

    run_event_loop(main())


class Exhausted(socket.socket):
    """A listening socket whose process has no descriptor left for the first connection."""

    num_failures = 1

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        if self.num_failures:
            self.num_failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_a_listener_without_descriptors_tries_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "RETRY_S", 0.01)

    async def main() -> None:
        made = asyncio.Event()

        class Protocol(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                made.set()
                transport.close()

        with listen("127.0.0.1", 0) as listening:
            exhausted = Exhausted(fileno=listening.detach())
            listener = Listener(exhausted, Protocol, make_turns(lambda _: NOBODY))
            with socket.create_connection(exhausted.getsockname()):
                async with asyncio.timeout(WAIT_S):
                    await made.wait()
            listener.close()
            await listener.wait_closed()
            exhausted.close()

    run_event_loop(main())
    assert "cannot accept connections" in caplog.text


def test_a_turn_reads_no_further_piece_when_those_before_took_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece of 250 kB may take as long as a hundred heads."""

    async def main() -> None:
        reading, times = ReadingTurns(), itertools.count()
        monkeypatch.setattr(time, "thread_time", lambda: 0.9 * READING_S * next(times))
        # The first tells when the turn began.
        assert [reading.begin() for _ in range(4)] == [True, True, False, False]
        await asyncio.sleep(0)
        assert reading.begin()

    asyncio.run(main())
