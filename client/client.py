"""The two clients of a server, one for event loops and one that blocks, of the same calls."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from client.answers import Received
from client.calls import AsyncStream, Calls, log
from client.http import DEFAULT_URL, URL_VARIABLE, AsyncTransport, BlockingTransport, ServerAddress

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R", bound=Received[Any])
D = TypeVar("D")
Tell = Callable[[str], object]


class _Opened:
    """How both clients are made: of an address and a key, or of an address that has been checked."""

    address: ServerAddress

    def __init__(
        self,
        url: str | None = None,
        *,
        key: str | None = None,
        key_file: str | Path | None = None,
        tenant: str | None = None,
        wait_s: int | None = None,
        tell: Tell = log.warning,
    ) -> None:
        where = url or os.environ.get(URL_VARIABLE) or DEFAULT_URL
        self._open(ServerAddress.of(where, key_file, tenant, key), wait_s, tell)

    @classmethod
    def at(cls, address: ServerAddress, wait_s: int | None = None, tell: Tell = log.warning) -> Self:
        """Return a client of a server whose address has been checked, as the options of commands give it."""
        client = cls.__new__(cls)
        client._open(address, wait_s, tell)
        return client

    def _open(self, address: ServerAddress, wait_s: int | None, tell: Tell) -> None:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address.url!r})"


class AsyncClient(_Opened, Calls):
    """A client of a server for programs with an event loop; use as an async context manager.

    Its calls are those of `Client`, to be awaited, and its streams are iterated with ``async for``. It is made as
    `Client` is, and raises the same.
    """

    def _open(self, address: ServerAddress, wait_s: int | None, tell: Tell) -> None:
        Calls.__init__(self, AsyncTransport(address), wait_s, tell)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._transport.close()


class Stream(Generic[R, D]):
    """An answer that comes in pieces: iterate it, once. As a context manager it ends with its block.

    The call is made when the first piece is asked for. An answer that is left before its end is generated no further.

    Attributes:
        answer: All that has come so far.
    """

    def __init__(self, stream: AsyncStream[R, D]) -> None:
        self._stream = stream
        self.answer = stream.answer

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> D:
        """Return the next piece. Raises as `AsyncStream` does."""
        try:
            return _finished(self._stream.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the answer; what has come stays in `answer`."""
        _finished(self._stream.aclose())


def _finished(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine over a blocking transport, with which it ends without having been suspended."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        found: T = end.value
        return found
    finally:
        coroutine.close()
    raise RuntimeError("a call over a blocking transport was suspended")


def _blocking(
    call: Callable[Concatenate[Calls, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    @wraps(call)
    def blocking(self: Client, /, *args: P.args, **options: P.kwargs) -> T:
        return _finished(call(self._calls, *args, **options))

    return blocking


def _blocking_stream(
    call: Callable[Concatenate[Calls, P], AsyncStream[R, D]],
) -> Callable[Concatenate[Client, P], Stream[R, D]]:
    @wraps(call)
    def blocking(self: Client, /, *args: P.args, **options: P.kwargs) -> Stream[R, D]:
        return Stream(call(self._calls, *args, **options))

    shown = inspect.signature(call)
    # Without it, tools show the asynchronous stream.
    returned = str(shown.return_annotation).removeprefix("Async")
    blocking.__signature__ = shown.replace(return_annotation=returned)  # type: ignore[attr-defined]
    return blocking


class Client(_Opened):
    """A client of a server; use as a context manager. Several threads may share it.

    Every call raises NoAnswer if the connection fails, ServerRefused if the server answers with an error (its subclass
    AuthenticationFailed if that is about the key), UnexpectedReply if the answer is no Peraxis server's, and UsageError
    for an argument that no server takes.

    Args:
        url: The server's address; by default PERAXIS_URL, or else port 8000 of this machine.
        key: The API key; by default that of `key_file`, or else PERAXIS_API_KEY.
        key_file: A file with the key.
        tenant: With an administrator's key: the tenant to act for.
        wait_s: Seconds for which calls that generate or push wait for a server that is starting. By default one that
            answers 503, or has answered before, is waited for 120 s, and a port where nothing listens is not.
        tell: Called with lines that tell of waits and of attempts that failed; by default they are logged.

    Raises:
        UsageError: The address or the key cannot be used.
    """

    def _open(self, address: ServerAddress, wait_s: int | None, tell: Tell) -> None:
        self.address = address
        self._transport = BlockingTransport(address)
        self._calls = Calls(self._transport, wait_s, tell)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        _finished(self._transport.close())

    generate = _blocking(Calls.generate)
    stream_generate = _blocking_stream(Calls.stream_generate)
    chat = _blocking(Calls.chat)
    stream_chat = _blocking_stream(Calls.stream_chat)
    tokenize = _blocking(Calls.tokenize)
    detokenize = _blocking(Calls.detokenize)
    push = _blocking(Calls.push)
    models = _blocking(Calls.models)
    variants = _blocking(Calls.variants)
    shared_variants = _blocking(Calls.shared_variants)
    variant = _blocking(Calls.variant)
    versions = _blocking(Calls.versions)
    promote = _blocking(Calls.promote)
    rollback = _blocking(Calls.rollback)
    set_visibility = _blocking(Calls.set_visibility)
    delete = _blocking(Calls.delete)
    load = _blocking(Calls.load)
    unload = _blocking(Calls.unload)
    pin = _blocking(Calls.pin)
    unpin = _blocking(Calls.unpin)
    keys = _blocking(Calls.keys)
    create_key = _blocking(Calls.create_key)
    revoke_key = _blocking(Calls.revoke_key)
    tenants = _blocking(Calls.tenants)
    set_limits = _blocking(Calls.set_limits)
    me = _blocking(Calls.me)
    acting_tenant = _blocking(Calls.acting_tenant)
    stats = _blocking(Calls.stats)
    check_alive = _blocking(Calls.check_alive)
    check_ready = _blocking(Calls.check_ready)
