"""Messages to the engine are read in tenants' turns, a bounded number of bytes between two steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from server.engine import clients
from server.engine.clients import REQUEST_BYTES, TURN_BYTES, Inbox
from server.errors import QueueFull
from server.protocol.messages import Header

MEBIBYTE = 1 << 20
PROMPT = bytes(MEBIBYTE)


def turns(inbox: Inbox) -> Iterator[list[bytes]]:
    """Yield the clients whose messages are read between two steps, until all are read."""
    while inbox:
        yield [identity for _, identity, _ in inbox.take()]


def test_what_is_read_between_two_steps_is_bounded_and_nothing_is_lost() -> None:
    inbox = Inbox()
    for number in range(40):
        inbox.put(b"%d" % number, Header("acme", f"r{number}"), PROMPT)
    read = list(turns(inbox))
    assert max(map(len, read)) * (MEBIBYTE + REQUEST_BYTES) < TURN_BYTES + MEBIBYTE + REQUEST_BYTES
    assert [identity for turn in read for identity in turn] == [b"%d" % number for number in range(40)]


def test_a_message_larger_than_a_turn_is_read_alone() -> None:
    inbox = Inbox()
    for name in (b"a", b"b"):
        inbox.put(name, Header("acme", "r"), bytes(2 * TURN_BYTES))
    assert list(turns(inbox)) == [[b"a"], [b"b"]]


def test_a_tenant_s_message_passes_those_of_another_that_came_first() -> None:
    inbox = Inbox()
    for _ in range(40):
        inbox.put(b"many", Header("many", "r"), PROMPT)
    list(inbox.take())
    for _ in range(2):
        inbox.put(b"few", Header("few", "r"), PROMPT)
    first = next(turns(inbox))
    assert first.count(b"few") == 2
    assert b"many" in first


def test_small_requests_take_turns_by_what_admitting_them_costs() -> None:
    inbox = Inbox()
    for number in range(10_000):
        inbox.put(b"many", Header("many", f"r{number}"), b"x")
    inbox.put(b"few", Header("few", "r"), b"x")
    first = next(turns(inbox))
    assert b"few" in first[:2]
    assert len(first) <= 1 + TURN_BYTES // REQUEST_BYTES


def test_what_follows_a_request_is_read_behind_it() -> None:
    inbox = Inbox()
    inbox.put(b"many", Header("many", "r"), bytes(TURN_BYTES))
    inbox.put(b"one", Header("one", "r"), PROMPT)
    inbox.put(b"one", Header("one"), b"cancel")
    read = [raw[:6] for _ in range(3) for *_, raw in inbox.take()]
    assert read.index(b"cancel") > read.index(PROMPT[:6])
    assert not inbox


def test_a_tenant_has_at_most_as_many_unread_bytes_as_it_leaves_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "MAX_UNREAD_BYTES", 8 * MEBIBYTE)
    inbox = Inbox()
    for number in range(4):
        inbox.put(b"many", Header("many", f"r{number}"), PROMPT)
    with pytest.raises(QueueFull, match="try again"):
        inbox.put(b"many", Header("many", "r4"), PROMPT)
    inbox.put(b"few", Header("few", "r"), PROMPT)
    # What another engine had admitted, and what is no request, is never refused.
    inbox.put(b"many", Header("many"), PROMPT)
    assert sum(len(turn) for turn in turns(inbox)) == 6
    inbox.put(b"many", Header("many", "r4"), PROMPT)
