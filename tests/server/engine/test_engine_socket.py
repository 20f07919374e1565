"""Bad bytes on the engine's socket: malformed, oversized, of another version."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from deltastore.errors import NotServable
from server.engine.clients import EngineSocket, refuse_clients
from server.protocol.messages import (
    MAX_MESSAGE_BYTES,
    EngineMessage,
    Header,
    Hello,
    Refused,
    decode_engine_message,
    encode,
    encode_header,
)

WAIT_MS = 30_000


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/engine"


@pytest.fixture
def engine_socket(address: str) -> Iterator[EngineSocket]:
    socket = EngineSocket(address)
    yield socket
    socket.close()


def client_of(address: str) -> zmq.Socket[bytes]:
    client: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    client.setsockopt(zmq.LINGER, 0)
    client.connect(address)
    return client


def receive(client: zmq.Socket[bytes]) -> EngineMessage:
    assert client.poll(WAIT_MS)
    return decode_engine_message(client.recv())


def receive_one(socket: EngineSocket) -> bytes:
    while not (found := socket.receive(1.0)):
        continue
    [(_, _, raw)] = found
    return raw


def test_an_oversized_message_is_dropped_and_others_still_arrive(
    engine_socket: EngineSocket, address: str
) -> None:
    with client_of(address) as hostile, client_of(address) as client:
        hostile.send(bytes(MAX_MESSAGE_BYTES + 1))
        client.send_multipart([b"head", b"hello"])
        assert receive_one(engine_socket) == b"hello"
        assert engine_socket.receive(0.2) == []


def test_messages_with_too_many_or_too_few_frames_are_dropped(
    engine_socket: EngineSocket, address: str
) -> None:
    with client_of(address) as client:
        client.send_multipart([b"a", b"b", b"c"])
        client.send(b"a")
        client.send_multipart([b"head", b"hello"])
        while not (found := engine_socket.receive(1.0)):
            continue
        assert [raw for _, _, raw in found] == [b"hello"]


def test_clients_are_refused_until_the_engine_is_told_to_stop(
    engine_socket: EngineSocket, address: str
) -> None:
    stopping, error = threading.Event(), NotServable("no such base")
    refusing = threading.Thread(target=refuse_clients, args=(engine_socket, error, 600.0, stopping))
    refusing.start()
    with client_of(address) as client:
        client.send_multipart([encode_header(Header()), encode(Hello())])
        answer = receive(client)
    stopping.set()
    refusing.join(WAIT_MS / 1000)
    assert not refusing.is_alive()
    assert isinstance(answer, Refused)
    assert str(answer.error) == "no such base"
