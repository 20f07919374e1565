"""Listening sockets: what they pass to their connections and to child processes, and taken ports."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deltastore.errors import SettingsError
from server.processes import inherited, listen, listening_sockets, raise_descriptor_limit, url_of, urls_of
from server.settings import Settings

# A child process that accepts one connection on the descriptor of its argument and sends a word.
ACCEPT_ONE = (
    "import sys; from server.processes import inherited; s = inherited(int(sys.argv[1])); "
    "c, _ = s.accept(); c.sendall(b'child')"
)


def test_a_connection_may_be_set_to_send_without_delay() -> None:
    with listen("127.0.0.1", 0) as listening:
        assert listening.proto == socket.IPPROTO_TCP
        copy = inherited(listening.dup().detach())
        with copy:
            assert copy.proto == socket.IPPROTO_TCP


def test_a_child_process_accepts_on_the_parent_s_socket() -> None:
    with listen("127.0.0.1", 0) as listening:
        descriptor = listening.fileno()
        child = subprocess.Popen([sys.executable, "-c", ACCEPT_ONE, str(descriptor)], pass_fds=[descriptor])
        with socket.create_connection(listening.getsockname()) as client:
            assert client.recv(5) == b"child"
        assert child.wait() == 0


def test_the_admin_port_may_have_an_address_of_its_own(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "base": tmp_path,
        "registry": tmp_path,
        "auth": "keys",
        "port": 0,
        "admin_port": 0,
    }
    settings = Settings(**given, host="127.0.0.2", admin_host="127.0.0.1")
    with listening_sockets(settings) as sockets:
        assert [each.getsockname()[0] for each in sockets] == ["127.0.0.2", "127.0.0.1"]
    with listening_sockets(Settings(**given, host="127.0.0.2")) as sockets:
        assert [each.getsockname()[0] for each in sockets] == ["127.0.0.2", "127.0.0.2"]


def test_a_port_in_use_is_one_clear_error() -> None:
    with listen("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(SettingsError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            listen("127.0.0.1", port)


def test_an_unknown_host_is_one_clear_error() -> None:
    with pytest.raises(SettingsError, match="choose another --host"):
        listen("no.such.invalid", 0)


def test_the_admin_port_is_named_after_the_public_one() -> None:
    with listen("127.0.0.1", 0) as public, listen("127.0.0.1", 0) as admin:
        assert urls_of([public]) == url_of(public)
        assert urls_of([public, admin]) == f"{url_of(public)}, and administered at {url_of(admin)}"


def test_the_url_of_port_zero_has_the_assigned_port() -> None:
    with listen("127.0.0.1", 0) as listening:
        assert url_of(listening) == f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_an_ipv6_address_is_in_brackets() -> None:
    try:
        listening = listen("::1", 0)
    except SettingsError:
        pytest.skip("no IPv6 loopback here")
    with listening:
        assert url_of(listening).startswith("http://[::1]:")


def test_the_soft_limit_of_descriptors_becomes_the_hard_one() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[0], 512), before[1]))
        assert raise_descriptor_limit() == before[1]
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
