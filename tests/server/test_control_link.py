"""The control link between the supervisor and an HTTP process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from server.errors import LinkBroken
from server.protocol.control import (
    LENGTH,
    MAX_MESSAGE_BYTES,
    ControlLink,
    HttpProcessMessage,
    Ping,
    Pong,
    http_process_end,
    supervisor_end,
)

Peer = socket.socket


def with_link(what: Callable[[ControlLink[HttpProcessMessage], Peer], Awaitable[None]]) -> None:
    """Run `what` with the supervisor's end of a link and the bare socket at its other end."""

    async def main() -> None:
        ours, theirs = socket.socketpair()
        link = await supervisor_end(ours)
        with theirs:
            await what(link, theirs)
        await link.close()

    asyncio.run(main())


def test_messages_arrive_in_order_until_the_end() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        supervisor, http = await supervisor_end(ours), await http_process_end(theirs)
        supervisor.send(Ping())
        assert await http.receive() == Ping()
        http.send(Pong())
        http.send(Pong())
        await http.close()
        assert [await supervisor.receive() for _ in range(3)] == [Pong(), Pong(), None]
        await supervisor.close()

    asyncio.run(main())


def test_a_message_that_is_too_large_breaks_the_link_before_it_is_read() -> None:
    async def what(link: ControlLink[HttpProcessMessage], peer: Peer) -> None:
        peer.sendall(LENGTH.pack(MAX_MESSAGE_BYTES + 1))
        with pytest.raises(LinkBroken, match=f"{MAX_MESSAGE_BYTES + 1} bytes"):
            await link.receive()

    with_link(what)


@pytest.mark.parametrize(
    "raw", [b"", b"\xc1", b"\x81\xa4type\xa4None"], ids=["empty", "no MessagePack", "other"]
)
def test_bytes_that_are_no_message_break_the_link(raw: bytes) -> None:
    async def what(link: ControlLink[HttpProcessMessage], peer: Peer) -> None:
        peer.sendall(LENGTH.pack(len(raw)) + raw)
        with pytest.raises(LinkBroken, match="cannot be read"):
            await link.receive()

    with_link(what)


def test_a_message_that_is_cut_off_is_the_end() -> None:
    async def what(link: ControlLink[HttpProcessMessage], peer: Peer) -> None:
        peer.sendall(LENGTH.pack(10) + b"half")
        peer.shutdown(socket.SHUT_WR)
        assert await link.receive() is None

    with_link(what)
