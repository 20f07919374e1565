"""The link between the supervisor and an HTTP process: MessagePack over connected sockets, each message with its size.

The end of either process ends the link.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Any, Generic, TypeVar

import msgspec

from server.errors import LinkBroken
from server.protocol.control import MAX_MESSAGE_BYTES, HttpProcessMessage, SupervisorMessage

LENGTH = struct.Struct("<I")

T = TypeVar("T")


class ControlLink(Generic[T]):
    """One end of a link; `T` is the union of messages that it receives."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: msgspec.msgpack.Decoder[T]
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: object) -> None:
        """Send a message without waiting; no effect after the other process has ended."""
        raw = self._encoder.encode(message)
        if not self._writer.is_closing():
            self._writer.write(LENGTH.pack(len(raw)) + raw)

    async def receive(self) -> T | None:
        """Return the next message, or None when the other process has ended.

        Raises:
            LinkBroken: the other process sent a message of more than `MAX_MESSAGE_BYTES`, or none of this protocol.
        """
        try:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            if length > MAX_MESSAGE_BYTES:
                raise LinkBroken(f"a message of {length} bytes, where {MAX_MESSAGE_BYTES} are the most")
            return self._decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError):
            return None
        except msgspec.DecodeError as error:
            raise LinkBroken(f"a message that cannot be read: {error}") from error

    async def close(self) -> None:
        """Close this end."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


async def supervisor_end(connected: socket.socket) -> ControlLink[HttpProcessMessage]:
    """Return the supervisor's end of a link."""
    return await _open(connected, HttpProcessMessage)


async def http_process_end(connected: socket.socket) -> ControlLink[SupervisorMessage]:
    """Return an HTTP process's end of a link."""
    return await _open(connected, SupervisorMessage)


async def _open(connected: socket.socket, messages: Any) -> ControlLink[Any]:
    reader, writer = await asyncio.open_connection(sock=connected)
    return ControlLink(reader, writer, msgspec.msgpack.Decoder(messages))
