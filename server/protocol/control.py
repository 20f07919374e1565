"""Configurations, messages and the link between the supervisor and the processes that it starts.

The link is MessagePack over connected sockets, each message with its size; the end of either process ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Raw, Struct

from server.errors import LinkBroken
from server.metrics.instruments import Snapshot
from server.protocol.messages import VERSION
from server.shared_state import AnyCall


class EngineConfig(Struct, frozen=True):
    """All that an engine process is given."""

    settings: str  # `Settings` as JSON
    address: str  # of the ROUTER that it binds
    parent_id: int
    version: str = VERSION


class HttpProcessConfig(Struct, frozen=True):
    """All that an HTTP process is given."""

    settings: str  # `Settings` as JSON
    identity: str  # names it to the engine
    parent_id: int
    link: int  # descriptor of its end of the control link
    listening: list[int]  # descriptors of the public socket and, if there is one, of the admin port's
    version: str = VERSION


def check_version(config: EngineConfig | HttpProcessConfig) -> None:
    """Exit with a message if the process that sent the configuration is of another version."""
    if config.version != VERSION:
        sys.exit(
            f"error: a server of version {config.version} started a process of version {VERSION}, "
            "as after an upgrade: restart the server"
        )


# Largest message in either direction; the metrics of all processes are the longest.
MAX_MESSAGE_BYTES = 16 << 20


class EngineStarted(Struct, frozen=True, tag=True):
    """To an HTTP process: connect to this engine, which may still load its base."""

    address: str


class EngineLost(Struct, frozen=True, tag=True):
    """To an HTTP process: the engine has died; another one is started."""


class Ping(Struct, frozen=True, tag=True):
    """To an HTTP process: answer with a Pong; without one, its event loop hangs."""


class MetricsWanted(Struct, frozen=True, tag=True):
    """To an HTTP process: answer with a MetricsOfProcess."""

    call_id: int


class SharedAnswer(Struct, frozen=True, tag=True):
    """To an HTTP process: the answer to its SharedQuestion."""

    call_id: int
    result: Raw = Raw(b"\xc0")  # MessagePack of the type that the call names
    error: str | None = None  # of a QueueFull that the call raised


SupervisorMessage = EngineStarted | EngineLost | Ping | MetricsWanted | SharedAnswer


class Serving(Struct, frozen=True, tag=True):
    """To the supervisor: the ports answer, and an engine is ready."""


class CannotServe(Struct, frozen=True, tag=True):
    """To the supervisor: this process cannot serve the base, nor can another one."""

    reason: str


class Pong(Struct, frozen=True, tag=True):
    """To the supervisor: the answer to a Ping."""


class MetricsOfProcess(Struct, frozen=True, tag=True):
    """To the supervisor: the metrics of this process alone."""

    call_id: int
    snapshot: Snapshot


class SharedQuestion(Struct, frozen=True, tag=True):
    """To the supervisor: a call to the shared state."""

    call_id: int
    call: AnyCall


HttpProcessMessage = Serving | CannotServe | Pong | MetricsOfProcess | SharedQuestion


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
