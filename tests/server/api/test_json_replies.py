"""JSON of replies: numbers that JSON lacks, text that UTF-8 lacks."""

from __future__ import annotations

import json
import math

from server.api.json_replies import JsonReply, encode, server_sent_event


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
