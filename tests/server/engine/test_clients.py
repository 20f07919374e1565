"""Clients that are slow get every event in order; clients that are gone are noted."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import zmq

from server.engine import clients as engine_socket
from server.engine.clients import Clients, EngineSocket
from server.errors import EngineFailed
from server.protocol.messages import (
    Beat,
    CallDone,
    ErrorEvent,
    Event,
    Outputs,
    PromptEvent,
    TokenEvent,
    decode_engine_message,
)

NUM_EVENTS = 2000
NAME = b"slow"
_numbers = itertools.count()


@pytest.fixture
def address() -> str:
    return f"inproc://clients-{next(_numbers)}"


@pytest.fixture
def socket(address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineSocket]:
    """A socket with room for a few messages."""
    monkeypatch.setattr(engine_socket, "MAX_WAITING_MESSAGES", 5)
    bound = EngineSocket(address)
    yield bound
    bound.close()


@pytest.fixture
def client(address: str, socket: EngineSocket) -> Iterator[zmq.Socket[bytes]]:
    """A connected client that the engine has heard of."""
    dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    with dealer:
        dealer.setsockopt(zmq.IDENTITY, NAME)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.set_hwm(5)
        dealer.connect(address)
        dealer.send_multipart([b"head", b"hello"])
        assert socket.receive(10.0)
        yield dealer


def test_a_client_that_reads_nothing_gets_all_events_when_it_reads_again(
    socket: EngineSocket, client: zmq.Socket[bytes]
) -> None:
    clients = Clients(socket)
    clients.add(NAME)
    for number in range(NUM_EVENTS):
        clients.add_event(NAME, "request", TokenEvent(0, number))
        clients.send_events()
        clients.broadcast(Beat())
    clients.send(NAME, CallDone(1, None))
    tokens: list[int] = []
    done = False
    while not done or len(tokens) < NUM_EVENTS:
        clients.send_events()
        # ZeroMQ may notice only a moment later that there is room again.
        if not client.poll(10):
            continue
        message = decode_engine_message(client.recv())
        if isinstance(message, Outputs):
            tokens += [event.token_id for _, event in message.events if isinstance(event, TokenEvent)]
        done = done or isinstance(message, CallDone)
    assert tokens == list(range(NUM_EVENTS))
    assert clients.take_lost() == []


def test_log_probabilities_of_several_prompts_are_several_messages(
    socket: EngineSocket, client: zmq.Socket[bytes]
) -> None:
    clients = Clients(socket)
    clients.add(NAME)
    events: list[Event] = [
        TokenEvent(0, 1),
        PromptEvent(()),
        PromptEvent(()),
        TokenEvent(0, 2),
        TokenEvent(0, 3),
    ]
    for event in events:
        clients.add_event(NAME, "request", event)
    clients.send_events()
    messages = [decode_engine_message(client.recv()) for _ in range(3)]
    parts = [[event for _, event in message.events] for message in messages if isinstance(message, Outputs)]
    assert parts == [events[:2], events[2:3], events[3:]]


def test_many_tokens_are_several_messages(
    socket: EngineSocket, client: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.engine.clients.MAX_SENT", 6)
    clients = Clients(socket)
    clients.add(NAME)
    for number in range(4):
        clients.add_event(NAME, "request", TokenEvent(0, number, -1.0, ((1, -1.0), (2, -2.0))))
    clients.send_events()
    messages = [decode_engine_message(client.recv()) for _ in range(2)]
    assert [len(message.events) for message in messages if isinstance(message, Outputs)] == [2, 2]


def test_what_cannot_be_sent_is_an_error_of_its_own_request_or_call(
    socket: EngineSocket, client: zmq.Socket[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    clients = Clients(socket)
    clients.add(NAME)
    # No UTF-8 has it.
    clients.send(NAME, CallDone(7, EngineFailed("\ud800")))
    clients.add_event(NAME, "request", TokenEvent(0, 1 << 70))
    clients.send_events()
    clients.add_event(NAME, "other", TokenEvent(0, 5))
    clients.send_events()
    done, failed, fine = [decode_engine_message(client.recv()) for _ in range(3)]
    assert isinstance(done, CallDone)
    assert (done.call_id, type(done.error)) == (7, EngineFailed)
    assert isinstance(failed, Outputs)
    [(request_id, event)] = failed.events
    assert (request_id, type(event)) == ("request", ErrorEvent)
    assert clients.take_unsendable() == ["request"]
    assert fine == Outputs((("other", TokenEvent(0, 5)),))
    assert "cannot be sent" in caplog.text


def test_a_client_that_is_gone_is_noted_and_its_requests_are_returned(socket: EngineSocket) -> None:
    clients = Clients(socket)
    clients.add(b"gone")
    clients.open_request(b"gone", "request")
    clients.add_event(b"gone", "request", TokenEvent(0, 1))
    clients.send_events()
    assert clients.take_lost() == [b"gone"]
    assert set(clients.remove(b"gone")) == {"request"}
