"""Listening sockets and file descriptors of the server's processes."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from deltastore.errors import SettingsError
from server.settings import Settings

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket, which child processes may inherit by its descriptor.

    Args:
        host: a name or an address; of several addresses the first.
        port: 0 takes a free one.

    Raises:
        SettingsError: the address is not available.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
        )[0]
        # asyncio sets TCP_NODELAY only on connections of a socket whose protocol is IPPROTO_TCP.
        listening = socket.socket(family, kind, proto)
    except OSError as error:
        raise _unavailable(host, port, error) from error
    try:
        # A restarted server may bind while connections of the last one are still in TIME_WAIT.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise _unavailable(host, port, error) from error
    return listening


@contextmanager
def listening_sockets(settings: Settings) -> Iterator[list[socket.socket]]:
    """Open the public socket and, with an admin port, its socket; close them at the end.

    Raises:
        SettingsError: an address is not available.
    """
    raise_descriptor_limit()
    with ExitStack() as stack:
        addresses = [(settings.host, settings.port)]
        if settings.admin_port is not None:
            addresses.append((settings.admin_host or settings.host, settings.admin_port))
        yield [stack.enter_context(listen(*address)) for address in addresses]


def inherited(descriptor: int) -> socket.socket:
    """Return the listening socket that the parent process opened with `listen`."""
    return socket.socket(fileno=descriptor)


def url_of(listening: socket.socket) -> str:
    """Return the URL that clients use."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def urls_of(sockets: Sequence[socket.socket]) -> str:
    """Return the public URL and, if there is an admin port, its URL, as a part of a sentence."""
    public, *admin = map(url_of, sockets)
    return f"{public}, and administered at {admin[0]}" if admin else public


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open file descriptors to the hard limit, and return it. Children inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def _unavailable(host: str, port: int, error: OSError) -> SettingsError:
    return SettingsError(f"cannot listen on {host}:{port}: {error.strerror}: choose another --host or --port")
