"""JSON of replies: numbers that JSON lacks, text that UTF-8 lacks, pages of lists."""

from __future__ import annotations

import asyncio
import json
import math

import pytest
from fastapi import FastAPI
from starlette.types import Message

from server.api.json_io import (
    MAX_PAGE_BYTES,
    PIECE_BYTES,
    JsonReply,
    encode,
    install_replies,
    page_reply,
    server_sent_event,
)
from server.errors import QueueFull
from server.fairness import FairBudget


def test_nan_and_infinity_become_null() -> None:
    assert json.loads(encode([math.nan, math.inf, 1.5])) == [None, None, 1.5]


def test_a_lone_surrogate_becomes_an_escape() -> None:
    assert json.loads(encode({"param": "a\ud800"})) == {"param": "a\ud800"}


def test_a_reply_is_utf_8_with_its_length() -> None:
    reply = JsonReply({"text": "é"}, status_code=201)
    assert reply.body == '{"text":"é"}'.encode()
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["content-length"] == str(len(reply.body))


def test_an_event_stays_one_event_whatever_its_text_is() -> None:
    event = server_sent_event("token", {"text": "a\n\nevent: done\r\n"})
    lines = event.decode().split("\n")
    assert (lines[0], lines[2:]) == ("event: token", ["", ""])
    assert json.loads(lines[1].removeprefix("data: ")) == {"text": "a\n\nevent: done\r\n"}


@pytest.mark.parametrize("last_id", [None, "z"])
def test_a_page_ends_where_its_bytes_do_and_has_at_least_one_document(last_id: str | None) -> None:
    half = {"text": "x" * (MAX_PAGE_BYTES // 2 - 100)}
    whole = {"text": "x" * MAX_PAGE_BYTES}

    def page(*documents: dict[str, str]) -> tuple[int, bool, str]:
        reply = page_reply("data", zip("abc", documents, strict=False), has_more=False, last_id=last_id)
        found = json.loads(bytes(reply.body))
        return len(found["data"]), found["has_more"], found["last_id"]

    assert page(half, half) == (2, False, last_id or "b")
    assert page(half, half, half) == (2, True, "b")
    assert page(whole, half) == (1, True, "a")


def test_a_large_reply_counts_for_its_tenant_until_its_last_piece_is_taken() -> None:
    app, reply = FastAPI(), JsonReply({"text": "x" * (2 * PIECE_BYTES)})
    scope = {"type": "http", "app": app, "state": {"tenant": "acme"}, "asgi": {"spec_version": "2.4"}}
    held: list[int] = []

    async def send_with(amount: int) -> None:
        unsent = FairBudget(amount, "bytes of replies")
        install_replies(app, unsent)

        async def send(message: Message) -> None:
            held.append(unsent.held("acme"))

        try:
            await reply(scope, _receive, send)
        finally:
            assert unsent.free == amount

    asyncio.run(send_with(2 * len(reply.body)))
    # The head, three pieces and the end.
    assert held == 5 * [len(reply.body)]
    held.clear()
    with pytest.raises(QueueFull):
        asyncio.run(send_with(2 * len(reply.body) - 1))
    assert held == []


async def _receive() -> Message:
    raise AssertionError("nothing is read")
