"""The connection to a server: its address and key, blocking and asynchronous transport, failed calls as exceptions."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from deltastore.console import printable
from deltastore.errors import PeraxisError, UsageError

if TYPE_CHECKING:
    import httpx


class NoAnswer(PeraxisError):
    """The connection broke, or the answer took too long."""


class NoServer(NoAnswer):
    """No connection could be made."""


class ServerRefused(PeraxisError):
    """The server answered with an error.

    Args:
        message: One line with the way out.
        status: The HTTP status.
        code: The server's code of the error; None if the answer has none, such as a proxy's.
        retry_after_s: The seconds after which the server takes the call again; None if it does not say.
    """

    def __init__(
        self, message: str, status: int, code: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


class AuthenticationFailed(ServerRefused):
    """The server asks for a key, does not know it, or does not let it make this call."""

    exit_code = 4


class UnexpectedReply(PeraxisError):
    """An answer that a Peraxis server of this version does not give."""


KEY_VARIABLE, URL_VARIABLE = "PERAXIS_API_KEY", "PERAXIS_URL"
DEFAULT_URL = "http://127.0.0.1:8000"
MAX_KEY_BYTES = 4096
CONNECT_S = 10.0
# Most calls; uploads and generation wait longer.
CALL_S = 60.0
MAX_REASON_CHARS = 300
# A value of Retry-After, which may be a date, too.
SECONDS = re.compile(r"[0-9]{1,9}")
# The code of a server whose port does not have the call; a variant that is missing has another one.
NO_SUCH_CALL = "not_found"

T = TypeVar("T")


class ErrorFields(msgspec.Struct, frozen=True):
    """The error of a refused call, as far as commands read it."""

    message: str
    code: str | None = None


class ErrorReply(msgspec.Struct, frozen=True):
    """The body of every error of a Peraxis server."""

    error: ErrorFields


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A server's URL, and the key and the tenant that go with each call. Errors name arguments in backticks."""

    url: str
    key: str | None = field(default=None, repr=False)
    # None: the key's own.
    tenant: str | None = None

    @classmethod
    def of(
        cls, url: str, key_file: str | Path | None = None, tenant: str | None = None, key: str | None = None
    ) -> ServerAddress:
        """Check a URL and take the key from `key` or `key_file`, or else from the environment.

        Args:
            url: The server's address.
            key_file: A file with the key, or None.
            tenant: The tenant to act for; None for the key's own.
            key: The key itself, or None.

        Raises:
            UsageError: The URL or the key cannot be used.
        """
        import httpx

        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise UsageError(
                f"`url` {url!r} is no URL ({error}): give one such as http://host:8000"
            ) from error
        if parsed.userinfo:
            raise UsageError(
                "`url` holds a user or password, which other users of this machine can see: "
                f"give the key in {KEY_VARIABLE} or a `key_file`"
            )
        if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query or parsed.fragment:
            raise UsageError(f"`url` {url!r} is no server's address: give one such as http://host:8000")
        if parsed.path.rstrip("/").endswith("/v1"):
            raise UsageError(f"`url` {url!r}: leave /v1 out, which only OpenAI's clients need")
        if key is not None and key_file is not None:
            raise UsageError("`key` and `key_file` both give a key: leave one of them out")
        if key_file is not None:
            found, where = _key_in(Path(key_file)), str(key_file)
        elif key is not None:
            found, where = key, "`key`"
        else:
            found, where = os.environ.get(KEY_VARIABLE, ""), KEY_VARIABLE
        return cls(url.rstrip("/"), _checked_key(found.strip(), where), tenant)

    def client_options(self) -> dict[str, Any]:
        """Return the arguments of an httpx client for this server, sync or async."""
        headers = {"User-Agent": f"peraxis/{version('peraxis')}"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        params = {} if self.tenant is None else {"tenant": self.tenant}
        return {"base_url": self.url, "headers": headers, "params": params}

    def timeout(self, read_s: float) -> httpx.Timeout:
        """Return the bounds of a call that waits so many seconds for the next bytes of its answer."""
        import httpx

        return httpx.Timeout(CALL_S, connect=CONNECT_S, read=read_s)

    @contextmanager
    def reached(self) -> Iterator[None]:
        """Turn a failure of the connection inside the block into NoServer or NoAnswer."""
        import httpx

        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise NoServer(
                f"no server answers at {self.url} ({_reason(error)}): start one with `peraxis serve`, "
                f"or give its address as `url` or {URL_VARIABLE}"
            ) from error
        except httpx.TimeoutException as error:
            raise NoAnswer(
                f"{self.url} did not answer in time ({_reason(error)}): see its log, or try again"
            ) from error
        except httpx.RequestError as error:
            raise NoAnswer(f"the connection to {self.url} broke off ({_reason(error)}): try again") from error

    def refusal(self, reply: httpx.Response) -> ServerRefused:
        """Return the exception of an answer that is an error; its body has been read."""
        try:
            fields = msgspec.json.decode(reply.content, type=ErrorReply).error
        except (msgspec.DecodeError, UnicodeDecodeError):
            fields = ErrorFields(_unknown_error(self.url, reply))
        message, retry_after = printable(fields.message), reply.headers.get("retry-after", "")
        kind = ServerRefused
        if fields.code == NO_SUCH_CALL:
            message = (
                f"{message}: {self.url} is not the port for this call; a server with --admin-port has those that "
                "administer it there, and all others on --port: give that address as `url`"
            )
        if reply.status_code == 401:
            kind, message = AuthenticationFailed, self._unauthenticated(message)
        elif reply.status_code == 403:
            kind = AuthenticationFailed
        retry_after_s = int(retry_after) if SECONDS.fullmatch(retry_after) else None
        return kind(message, reply.status_code, fields.code, retry_after_s)

    def _unauthenticated(self, message: str) -> str:
        if self.key is None:
            return f"{self.url} asks for an API key: set {KEY_VARIABLE} or give `key_file`"
        return f"{self.url} does not accept the API key ({message}): check {KEY_VARIABLE} or `key_file`"


class Transport(Protocol):
    """How calls reach a server and how they wait. The blocking one never suspends a coroutine that awaits it."""

    address: ServerAddress

    async def send(
        self, method: str, path: str, *, is_streamed: bool = False, **options: Any
    ) -> httpx.Response:
        """Make a call with httpx's options; `content` is an iterator of bytes.

        Returns:
            The answer, whatever its status. Its body has been read unless it `is_streamed`.

        Raises:
            NoAnswer: The connection failed.
        """

    def pieces(self, reply: httpx.Response) -> AsyncGenerator[bytes]:
        """Yield the body of an answer that is streamed as it comes, then close it."""

    async def work(self, function: Callable[[], T]) -> T:
        """Run a function that reads files."""

    async def sleep(self, seconds: float) -> None:
        """Wait."""

    async def close(self) -> None:
        """Close all connections."""


class BlockingTransport:
    """A transport whose coroutines end without having been suspended, so that no event loop has to run them."""

    def __init__(self, address: ServerAddress) -> None:
        import httpx

        self.address = address
        self._client = httpx.Client(**address.client_options())

    async def send(
        self, method: str, path: str, *, is_streamed: bool = False, **options: Any
    ) -> httpx.Response:
        with self.address.reached():
            request = self._client.build_request(method, path, **options)
            reply = self._client.send(request, stream=is_streamed)
            if is_streamed and not reply.is_success:
                reply.read()
            return reply

    async def pieces(self, reply: httpx.Response) -> AsyncGenerator[bytes]:
        try:
            with self.address.reached():
                for piece in reply.iter_bytes():
                    yield piece
        finally:
            reply.close()

    async def work(self, function: Callable[[], T]) -> T:
        return function()

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def close(self) -> None:
        self._client.close()


class AsyncTransport:
    """A transport for an event loop; files are read on other threads."""

    def __init__(self, address: ServerAddress) -> None:
        import httpx

        self.address = address
        self._client = httpx.AsyncClient(**address.client_options())

    async def send(
        self, method: str, path: str, *, is_streamed: bool = False, **options: Any
    ) -> httpx.Response:
        if (content := options.get("content")) is not None:
            options["content"] = _in_threads(content)
        with self.address.reached():
            request = self._client.build_request(method, path, **options)
            reply = await self._client.send(request, stream=is_streamed)
            if is_streamed and not reply.is_success:
                await reply.aread()
            return reply

    async def pieces(self, reply: httpx.Response) -> AsyncGenerator[bytes]:
        try:
            with self.address.reached():
                async for piece in reply.aiter_bytes():
                    yield piece
        finally:
            await reply.aclose()

    async def work(self, function: Callable[[], T]) -> T:
        return await asyncio.to_thread(function)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def close(self) -> None:
        await self._client.aclose()


async def _in_threads(blocks: Iterator[bytes]) -> AsyncIterator[bytes]:
    while (block := await asyncio.to_thread(next, blocks, None)) is not None:
        yield block


class Reply(msgspec.Struct, frozen=True, dict=True):
    """An answer of the server; a field that only newer servers send stands in `as_json` alone."""

    def as_json(self) -> Any:
        """Return the server's JSON document; of a part of an answer, the fields that this client knows."""
        return vars(self).get("document") or msgspec.to_builtins(self)


async def called(
    transport: Transport, method: str, path: str, *, read_s: float = CALL_S, **options: Any
) -> httpx.Response:
    """Make a call with httpx's options; return the answer, which is no error and no redirection.

    Args:
        transport: The way to the server.
        method: HTTP's.
        path: The route.
        read_s: How long it waits for the next bytes of the answer, in seconds.
        options: Beside those of httpx, `is_streamed`.

    Raises:
        NoAnswer, ServerRefused: The call failed.
    """
    address = transport.address
    reply = await transport.send(method, path, timeout=address.timeout(read_s), **options)
    # 304 answers a question; other redirections lead to other servers, which must not get the key.
    if reply.is_success or reply.status_code == 304:
        return reply
    raise address.refusal(reply)


def parsed(content: bytes, kind: type[T]) -> T:
    """Parse the body of an answer.

    Raises:
        UnexpectedReply: It is not as this version of the server writes it.
    """
    try:
        return converted(msgspec.json.decode(content), kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise unexpected(printable(str(error))) from error


def converted(document: Any, kind: type[T]) -> T:
    """Check a JSON document of an answer, or of a part of one, and keep it. Raises as `parsed` does."""
    try:
        reply = msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise unexpected(printable(str(error))) from error
    if isinstance(reply, Reply):
        vars(reply)["document"] = document
    return reply


def unexpected(problem: str) -> UnexpectedReply:
    """Return the exception of an answer that is not as this version of the server writes it."""
    return UnexpectedReply(
        f"the answer is not a Peraxis server's ({problem}): check `url`, "
        "and that server and client have the same version"
    )


def _key_in(file: Path) -> str:
    if not file.exists():
        raise UsageError(f"{file}: no such file: give `key_file` a file that holds the key")
    with file.open("rb") as opened:
        key = opened.read(MAX_KEY_BYTES + 1).decode("latin-1")
    if not key.strip():
        raise UsageError(f"{file} is empty: write the key into it")
    return key


def _checked_key(key: str, where: str) -> str | None:
    if not key:
        return None
    if len(key) > MAX_KEY_BYTES or not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(f"{where} holds no API key: a key is one word of letters, digits, '-' and '_'")
    return key


def _unknown_error(url: str, reply: httpx.Response) -> str:
    if reply.is_redirect:
        return f"{url} leads to {printable(reply.headers.get('location', ''))}: give that server as `url`"
    return f"{url} answered {reply.status_code} {printable(reply.reason_phrase)}: check `url`"


def _reason(error: httpx.RequestError) -> str:
    # httpx has no text for some of them.
    return printable(str(error))[:MAX_REASON_CHARS] or type(error).__name__
