"""The connection to a server: its address and key, failed calls as exceptions, and lists that come a page at a time."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

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


KEY_VARIABLE = "PERAXIS_API_KEY"
MAX_KEY_BYTES = 4096
CONNECT_S = 10.0
# Calls of commands; uploads and generation wait longer.
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
    """A server's URL, and the key and the tenant that go with each call."""

    url: str
    key: str | None = field(default=None, repr=False)
    # None: the key's own.
    tenant: str | None = None

    @classmethod
    def of(cls, url: str, key_file: Path | None, tenant: str | None = None) -> ServerAddress:
        """Check a URL and read the key, from `key_file` or else from the environment.

        Args:
            url: The server's address.
            key_file: A file with the key, or None.
            tenant: The tenant to act for; None for the key's own.

        Raises:
            UsageError: The URL or the key cannot be used.
        """
        import httpx

        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise UsageError(
                f"--url {url!r} is no URL ({error}): give one such as http://host:8000"
            ) from error
        if parsed.userinfo:
            raise UsageError(
                "--url holds a user or password, which other users of this machine can see: "
                f"give the key in {KEY_VARIABLE} or a --key-file"
            )
        if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query or parsed.fragment:
            raise UsageError(f"--url {url!r} is no server's address: give one such as http://host:8000")
        if parsed.path.rstrip("/").endswith("/v1"):
            raise UsageError(f"--url {url!r}: leave /v1 out, which only OpenAI's clients need")
        key, where = os.environ.get(KEY_VARIABLE, ""), KEY_VARIABLE
        if key_file is not None:
            if not key_file.exists():
                raise UsageError(f"{key_file}: no such file: give --key-file a file that holds the key")
            with key_file.open("rb") as file:
                key, where = file.read(MAX_KEY_BYTES + 1).decode("latin-1"), str(key_file)
            if not key.strip():
                raise UsageError(f"{key_file} is empty: write the key into it")
        return cls(url.rstrip("/"), _checked_key(key.strip(), where), tenant)

    def client_options(self, read_s: float = CALL_S) -> dict[str, Any]:
        """Return the arguments of an httpx client for this server, sync or async.

        Args:
            read_s: How long it waits for the next bytes of an answer, in seconds.
        """
        import httpx

        headers = {"User-Agent": f"peraxis/{version('peraxis')}"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        timeout = httpx.Timeout(CALL_S, connect=CONNECT_S, read=read_s)
        params = {} if self.tenant is None else {"tenant": self.tenant}
        return {"base_url": self.url, "headers": headers, "params": params, "timeout": timeout}

    @contextmanager
    def reached(self) -> Iterator[None]:
        """Turn a failure of the connection inside the block into NoServer or NoAnswer."""
        import httpx

        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise NoServer(
                f"no server answers at {self.url} ({_reason(error)}): start one with `peraxis serve`, "
                "or give its address as --url or PERAXIS_URL"
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
                f"{message}: {self.url} is not the port for this call; with --admin-port, a server has those that "
                "administer it there, and all others on --port: give that address as --url"
            )
        if reply.status_code == 401:
            kind, message = AuthenticationFailed, self._unauthenticated(message)
        elif reply.status_code == 403:
            kind = AuthenticationFailed
        retry_after_s = int(retry_after) if SECONDS.fullmatch(retry_after) else None
        return kind(message, reply.status_code, fields.code, retry_after_s)

    def _unauthenticated(self, message: str) -> str:
        if self.key is None:
            return f"{self.url} asks for an API key: set {KEY_VARIABLE} or give --key-file"
        return f"{self.url} does not accept the API key ({message}): check {KEY_VARIABLE} or --key-file"


class RemoteServer:
    """A server that commands call one after the other. Use as a context manager.

    Args:
        address: The server.
        read_s: How long a call waits for the next bytes of its answer, in seconds.
    """

    def __init__(self, address: ServerAddress, read_s: float = CALL_S) -> None:
        import httpx

        self.address = address
        self._client = httpx.Client(**address.client_options(read_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def call(
        self, method: str, path: str, *, params: Mapping[str, str] | None = None, body: Any = None
    ) -> bytes:
        """Make a call with an optional JSON body; return the body of the answer.

        Raises:
            NoAnswer, ServerRefused: The call failed.
        """
        return self.send(method, path, params=params, json=body).content

    def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Make a call with httpx's options; return the answer, which is no error. Raises as `call` does."""
        with self.address.reached():
            reply = self._client.request(method, path, **options)
        # 304 answers a question; other redirections lead to other servers, which must not get the key.
        if reply.is_success or reply.status_code == 304:
            return reply
        raise self.address.refusal(reply)


def parsed(content: bytes, kind: type[T]) -> T:
    """Parse the body of an answer.

    Raises:
        UnexpectedReply: It is not as this version of the server writes it.
    """
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise unexpected(printable(str(error))) from error


def unexpected(problem: str) -> UnexpectedReply:
    """Return the exception of an answer that is not as this version of the server writes it."""
    return UnexpectedReply(
        f"the answer is not a Peraxis server's ({problem}): check --url, "
        "and that server and command have the same version"
    )


def _checked_key(key: str, where: str) -> str | None:
    if not key:
        return None
    if len(key) > MAX_KEY_BYTES or not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(f"{where} holds no API key: a key is one word of letters, digits, '-' and '_'")
    return key


def _unknown_error(url: str, reply: httpx.Response) -> str:
    if reply.is_redirect:
        return f"{url} leads to {printable(reply.headers.get('location', ''))}: give that server as --url"
    return f"{url} answered {reply.status_code} {printable(reply.reason_phrase)}: check --url"


def _reason(error: httpx.RequestError) -> str:
    # httpx has no text for some of them.
    return printable(str(error))[:MAX_REASON_CHARS] or type(error).__name__


class PageReply(msgspec.Struct, frozen=True):
    """The fields of every page."""

    has_more: bool = False
    last_id: str | None = None


def whole_list(server: RemoteServer, path: str, key: str, params: Mapping[str, str] | None = None) -> bytes:
    """Ask for all pages of a list; return one document, the first page's with the entries of all.

    Args:
        server: The server.
        path: The route.
        key: The name of the list in a page.
        params: Of each call.

    Raises:
        NoAnswer, ServerRefused, UnexpectedReply: A call failed.
    """
    pages = _pages(server, path, key, params or {})
    document = next(pages)
    for page in pages:
        document[key] += page[key]
    return json.dumps(document).encode()


def _pages(server: RemoteServer, path: str, key: str, params: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    after: dict[str, str] = {}
    while True:
        content = server.call("GET", path, params={**params, **after})
        reply, document = parsed(content, PageReply), parsed(content, dict[str, Any])
        if not isinstance(document.get(key), list):
            raise unexpected(f"it has no list {key!r}")
        # They are of the page.
        document.pop("has_more", None)
        document.pop("last_id", None)
        yield document
        if not reply.has_more:
            return
        if reply.last_id is None or reply.last_id == after.get("after"):
            raise unexpected("the next page of the list begins where this one began")
        after = {"after": reply.last_id}
