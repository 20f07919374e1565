"""Configurations, messages and the link between the supervisor and the processes that it starts.

The link is MessagePack over connected sockets, each message with its size; the end of either process ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import itertools
import socket
import struct
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

import msgspec
from msgspec import Raw, Struct, msgpack

from server.errors import LinkBroken, QueueFull
from server.metrics.instruments import Snapshot
from server.protocol.messages import VERSION
from server.protocol.step_page import Suspect
from server.shared_state import SharedState


class EngineConfig(Struct, frozen=True):
    """All that an engine process is given."""

    settings: str  # `Settings` as JSON
    address: str  # of the ROUTER that it binds
    parent_id: int
    page: str | None = None  # file of its StepPage; None: no other engine follows it
    suspects: tuple[Suspect, ...] = ()  # in the step in which the engine before it died
    version: str = VERSION
    code: str | None = None  # the server's `code_digest`, for an engine that another Python runs


class HttpProcessConfig(Struct, frozen=True):
    """All that an HTTP process is given."""

    settings: str  # `Settings` as JSON
    identity: str  # names it to the engine
    parent_id: int
    link: int  # descriptor of its end of the control link
    listening: list[int]  # descriptors of the public socket and, if there is one, of the admin port's
    version: str = VERSION


def check_version(config: EngineConfig | HttpProcessConfig) -> None:
    """Exit with a message if the process that sent the configuration is of another version or has other code."""
    code = config.code if isinstance(config, EngineConfig) else None
    if code is not None and (config.version, code) != (VERSION, code_digest()):
        sys.exit(
            f"error: {sys.executable} has peraxis {VERSION} with code {code_digest()[:12]}, and the server is "
            f"{config.version} with code {code[:12]}: install the server's build there, `{sys.executable} -m pip "
            "install --force-reinstall --no-deps` of its wheel or checkout"
        )
    if config.version != VERSION:
        sys.exit(
            f"error: a server of version {config.version} started a process of version {VERSION}, "
            "as after an upgrade: restart the server"
        )


@cache
def code_digest() -> str:
    """Return a digest of the Python files that both sides of a protocol run, as they were at the first call.

    Builds of one version may differ, as those of two commits do.
    """
    found, root = hashlib.sha256(), Path(__file__).parents[2]
    for package in ("deltastore", "server"):
        for path in sorted((root / package).rglob("*.py")):
            content = path.read_bytes()
            found.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    return found.hexdigest()


# Largest message in either direction; the metrics of all processes are the longest.
MAX_MESSAGE_BYTES = 16 << 20


class EngineStarted(Struct, frozen=True, tag=True):
    """To an HTTP process: connect to this engine, which may still load its base."""

    address: str
    quarantined: tuple[str, ...] = ()  # labels of versions whose requests have ended engines


class EngineLost(Struct, frozen=True, tag=True):
    """To an HTTP process: the engine has died; another one is started."""

    culprits: tuple[str, ...] = ()  # ids of the requests that ended it
    given_up: tuple[str, ...] = ()  # ids of those that are not sent again, because engines die with them
    quarantined: tuple[str, ...] = ()  # labels of versions whose requests have ended engines


class Ping(Struct, frozen=True, tag=True):
    """To an HTTP process: answer with a Pong; without one, its event loop hangs."""


class MetricsWanted(Struct, frozen=True, tag=True):
    """To an HTTP process: answer with a MetricsOfProcess."""

    call_id: int


class StateAnswer(Struct, frozen=True, tag=True):
    """To an HTTP process: what its StateCall returned."""

    call_id: int
    result: Raw = Raw(b"\xc0")  # MessagePack of the method's return type
    error: str | None = None  # of a QueueFull that the call raised


SupervisorMessage = EngineStarted | EngineLost | Ping | MetricsWanted | StateAnswer


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


class StateCall(Struct, frozen=True, tag=True):
    """To the supervisor: call a method of the shared state."""

    call_id: int
    method: str  # of `SharedState`
    arguments: Raw  # MessagePack of all of them


HttpProcessMessage = Serving | CannotServe | Pong | MetricsOfProcess | StateCall


class RemoteState:
    """A `SharedState` in another process: its methods, and nothing else of it. Event loop only.

    Args:
        send: sends a call; called in the order in which calls are made.
    """

    def __init__(self, send: Callable[[StateCall], None]) -> None:
        self._send = send
        self._ids = itertools.count()
        self._asked: dict[int, asyncio.Future[StateAnswer]] = {}

    def __getattr__(self, method: str) -> Callable[..., Any]:
        is_answered, _, answer_type = _signature(method)

        def call(*arguments: Any) -> Any:
            made = StateCall(next(self._ids), method, Raw(msgpack.encode(arguments)))
            asked: asyncio.Future[StateAnswer] | None = None
            if is_answered:
                asked = self._asked[made.call_id] = asyncio.get_running_loop().create_future()
            self._send(made)
            return None if asked is None else self._answer(made.call_id, asked, answer_type)

        return call

    def take(self, answer: StateAnswer) -> None:
        """Take in the answer to a call; one that is late is ignored."""
        asked = self._asked.get(answer.call_id)
        if asked is not None and not asked.done():
            asked.set_result(answer)

    async def _answer(self, call_id: int, asked: asyncio.Future[StateAnswer], answer_type: Any) -> Any:
        try:
            answer = await asked
        finally:
            del self._asked[call_id]
        if answer.error is not None:
            raise QueueFull(answer.error)
        return msgpack.decode(answer.result, type=answer_type)


async def perform(shared: SharedState, call: StateCall) -> StateAnswer:
    """Do what another process calls, and return its answer; that of a call that is told is not waited for.

    Raises:
        LinkBroken: there is no such method, or it takes other arguments.
    """
    try:
        is_answered, arguments_type, _ = _signature(call.method)
        arguments = msgpack.decode(call.arguments, type=arguments_type)
    except (AttributeError, msgspec.DecodeError) as error:
        raise LinkBroken(f"a call of {call.method!r} that cannot be made: {error}") from error
    try:
        result = getattr(shared, call.method)(*arguments)
        return StateAnswer(call.call_id, Raw(msgpack.encode(await result if is_answered else None)))
    except QueueFull as error:
        return StateAnswer(call.call_id, error=error.public)


@cache
def _signature(method: str) -> tuple[bool, Any, Any]:
    """Return whether a method of `SharedState` is answered, the type of its arguments together, and of its result."""
    if method.startswith("_"):
        raise AttributeError(f"the shared state has no method {method!r} for other processes")
    function = getattr(SharedState, method)
    hints = get_type_hints(function)
    result = hints.pop("return")
    return inspect.iscoroutinefunction(function), tuple[tuple(hints.values())], result  # type: ignore[misc]


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
