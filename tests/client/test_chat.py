"""`peraxis chat`: what it asks, how it shows answers, and how failures end it."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from typing import Any

import pytest

from client import waiting
from client.answers import Answer, ReceivedChunk, ReceivedUsage
from client.calls import Calls
from client.http import AsyncTransport, ServerAddress, parsed
from peraxis.cli import run
from tests.client.helpers.scripted_server import (
    Reaction,
    ScriptedServer,
    events,
    hang_after,
    refuse,
    scripted_server,
)
from tests.client.helpers.terminal import on_terminal
from tests.server.helpers.live_server import LiveServer

Output = pytest.CaptureFixture[str]
DIGEST = "sha256:" + "ab" * 32
USAGE = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}}


def piece(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}]}


def said(*texts: str, is_whole: bool = True) -> Reaction:
    """Answer with these pieces, as version 2."""
    chunks = [*map(piece, texts), piece("", "stop"), USAGE]
    return events(*chunks, is_whole=is_whole, X_Peraxis_Version="2", X_Peraxis_Digest=DIGEST)


def body_of(server: ScriptedServer, number: int) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(server.received[number].body)
    return body


def test_one_prompt_is_answered_on_stdout_and_its_facts_on_stderr(capsys: Output) -> None:
    with scripted_server(said("Hel", "lo.")) as server:
        assert run(["chat", "a@2", "--once", "Hi", "--url", server.url]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello.\n"
    assert captured.err.startswith("[first token ")
    assert captured.err.endswith(", version 2, digest abababababab]\n")
    assert server.calls == ["POST /v1/chat/completions"]


def test_a_variant_answers_with_its_own_template_version_and_digest(
    server: LiveServer, capsys: Output
) -> None:
    options = ["--once", "hello", "--temperature", "0", "--max-tokens", "4", "--url", server.url, "--json"]
    assert run(["chat", "--compare", "chatty", "chatty@1", *options]) == 0
    first, second = json.loads(capsys.readouterr().out)["answers"]
    body = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 4}
    reply = server.client.post("/v1/chat/completions", json={"model": "chatty", **body})
    expected = reply.json()["choices"][0]
    for answer in (first, second):
        assert answer["text"] == expected["message"]["content"]
        assert answer["finish_reason"] == expected["finish_reason"]
        assert (answer["version"], answer["digest"]) == (1, reply.headers["X-Peraxis-Digest"])
        assert answer["usage"]["completion_tokens"] == reply.json()["usage"]["completion_tokens"]


def test_a_variant_that_does_not_exist_is_named(server: LiveServer, capsys: Output) -> None:
    assert run(["chat", "absent", "--once", "hello", "--url", server.url, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "model_not_found"


def test_the_request_has_the_options_that_were_given() -> None:
    options = ["--system", "Be brief.", "--max-tokens", "7", "--temperature", "0", "--seed", "3"]
    with scripted_server(said("a"), said("b")) as server:
        assert run(["chat", "a", "--once", "Hi", "--url", server.url]) == 0
        assert run(["chat", "a", "--once", "Hi", "--url", server.url, *options]) == 0
    question = {"role": "user", "content": "Hi"}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    assert body_of(server, 0) == {"model": "a", "messages": [question], **streamed}
    assert body_of(server, 1) == {
        "model": "a",
        "messages": [{"role": "system", "content": "Be brief."}, question],
        "max_tokens": 7,
        "temperature": 0,
        "seed": 3,
        **streamed,
    }


def test_json_has_the_text_the_version_and_the_times(capsys: Output) -> None:
    with scripted_server(said("Hel", "lo.")) as server:
        assert run(["chat", "a", "--once", "Hi", "--url", server.url, "--json"]) == 0
    captured = capsys.readouterr()
    (answer,) = json.loads(captured.out)["answers"]
    assert answer["first_token_s"] > 0
    assert {key: answer[key] for key in ("model", "text", "finish_reason", "version", "digest", "usage")} == {
        "model": "a",
        "text": "Hello.",
        "finish_reason": "stop",
        "version": 2,
        "digest": DIGEST,
        "usage": {"prompt_tokens": 5, "completion_tokens": 3},
    }
    assert captured.err == ""


@pytest.mark.parametrize(
    ("num_pieces", "last_at", "speed"), [(3, 1.5, 4.0), (2, 1.5, None), (3, 1.0001, None)]
)
def test_a_speed_is_told_only_of_text_that_came_over_time(
    num_pieces: int, last_at: float, speed: float | None
) -> None:
    received = Answer("a", usage=ReceivedUsage(5, 3), first_at=1.0, last_at=last_at, num_pieces=num_pieces)
    assert received.tokens_per_s == speed


def test_line_separators_in_an_answer_do_not_split_its_events(capsys: Output) -> None:
    text = "one\u2028two\x85three\nfour"
    with scripted_server(said(text)) as server:
        assert run(["chat", "a", "--once", "Hi", "--url", server.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["answers"][0]["text"] == text


def test_standard_input_is_one_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    with scripted_server(said("a")) as server:
        assert run(["chat", "a", "--url", server.url]) == 0
    assert body_of(server, 0)["messages"][0]["content"] == "two\nlines"


def test_two_variants_get_the_same_prompt(capsys: Output) -> None:
    with scripted_server(said("same"), said("same")) as server:
        assert run(["chat", "--compare", "a", "b@1", "--once", "Hi", "--url", server.url]) == 0
    assert {body_of(server, number)["model"] for number in (0, 1)} == {"a", "b@1"}
    first, one, second, two = capsys.readouterr().out.splitlines()
    assert (one, two) == ("same", "same")
    assert first.startswith("== a: first token ")
    assert second.startswith("== b@1: first token ")
    assert second.endswith("digest abababababab")


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["a", "--compare", "a", "b"],
        ["a", "--compare", "b"],
        ["a", "--max-tokens", "0"],
        ["a", "--temperature", "-1"],
    ],
)
def test_wrong_arguments_end_with_2(args: list[str], capsys: Output) -> None:
    assert run(["chat", *args, "--once", "Hi", "--url", "http://127.0.0.1:1"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("content", ["", " \n"])
def test_an_empty_standard_input_ends_with_2(
    content: str, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(content))
    assert run(["chat", "a"]) == 2
    assert "standard input is empty" in capsys.readouterr().err


def test_standard_input_that_is_no_text_ends_with_2(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), "utf-8"))
    assert run(["chat", "a"]) == 2
    assert "no text in UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("reaction", "message"),
    [
        (refuse(404, "model_not_found", "there is no variant 'a'"), "there is no variant 'a'"),
        (said("Hel", is_whole=False), "the answer of a broke off: ask again"),
        (events(piece("Hel"), {"error": {"message": "the engine ended", "code": "engine_restarted"}}),
         "the engine ended"),
        (events(["no chunk"]), "is not a Peraxis server's"),
    ],
    ids=["refused", "broken off", "failed later", "no chunk"],
)  # fmt: skip
@pytest.mark.parametrize("names", [["a"], ["--compare", "a", "a"]], ids=["one", "two"])
def test_a_failed_answer_is_one_line(
    names: list[str], reaction: Reaction, message: str, capsys: Output
) -> None:
    with scripted_server(reaction, reaction) as server:
        assert run(["chat", *names, "--once", "Hi", "--url", server.url]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out or captured.out.endswith("\n")


def test_a_wrong_request_names_the_model(capsys: Output) -> None:
    with scripted_server(refuse(400, "invalid_request", "there is no chat template here")) as server:
        assert run(["chat", "plain", "--once", "Hi", "--url", server.url]) == 1
    assert capsys.readouterr().err == "error: plain: there is no chat template here\n"


@pytest.mark.parametrize("names", [["a"], ["--compare", "a", "a"]], ids=["one", "two"])
def test_a_server_that_is_starting_is_waited_for_with_one_line(
    names: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setattr(waiting, "MAX_PAUSE_S", 0)
    starting = [refuse(503, "overloaded", "the base is still loading", Retry_After="0")] * 5
    with scripted_server(*starting, said("Hello."), said("Hello.")) as server:
        assert run(["chat", *names, "--once", "Hi", "--url", server.url]) == 0
    captured = capsys.readouterr()
    assert "Hello.\n" in captured.out
    assert captured.err.startswith(f"waiting up to 120 s for {server.url}: the base is still loading\n")
    assert captured.err.count("waiting") == 1


def test_a_server_that_never_answered_is_not_asked_again_without_wait(capsys: Output) -> None:
    with scripted_server() as server:
        url = server.url
    assert run(["chat", "a", "--once", "Hi", "--url", url]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert run(["chat", "a", "--once", "Hi", "--url", url, "--wait", "1"]) == 1
    assert capsys.readouterr().err.startswith(f"waiting up to 1 s for {url}: ")


def test_the_time_to_the_first_token_is_without_the_wait_for_the_server() -> None:
    pauses: list[float] = []

    class Paused(AsyncTransport):
        async def sleep(self, seconds: float) -> None:
            pauses.append(seconds)

    async def ask(url: str) -> tuple[Answer, float]:
        transport = Paused(ServerAddress.of(url))
        stream = Calls(transport).stream_chat("a", "Hi")
        began_at = stream.answer.sent_at
        async for _ in stream:
            pass
        await transport.close()
        return stream.answer, began_at

    with scripted_server(refuse(503, "draining"), said("Hello.")) as server:
        answer, began_at = asyncio.run(ask(server.url))
    assert (pauses, answer.text) == ([1], "Hello.")
    assert answer.sent_at > began_at


def test_on_a_terminal_a_conversation_goes_on_until_the_end_of_input() -> None:
    with scripted_server(
        said("Hello."), refuse(429, "rate_limited", "busy: try again"), said("Bye.")
    ) as server:
        session = on_terminal(
            "chat", "a", "--url", server.url,
            typed=(("> ", b"Hi\n"), ("]", b""), ("> ", b"Again\n"), ("> ", b"End\n"), ("Bye.", b""), ("> ", b"\x04")),
        )  # fmt: skip
    assert session.code == 0
    assert "error: busy: try again" in session.screen
    # The prompt that failed is no part of the conversation.
    assert [message["content"] for message in body_of(server, 2)["messages"]] == ["Hi", "Hello.", "End"]


def test_ctrl_c_ends_an_answer_and_not_the_conversation() -> None:
    with scripted_server(hang_after(piece("Hel")), said("Bye.")) as server:
        session = on_terminal(
            "chat", "a", "--url", server.url,
            typed=(("> ", b"Hi\n"), ("Hel", b"\x03"), ("> ", b"End\n"), ("Bye.", b""), ("> ", b"\x04")),
        )  # fmt: skip
    assert session.code == 0
    assert [message["content"] for message in body_of(server, 1)["messages"]] == ["End"]


def test_ctrl_c_during_the_only_answer_ends_with_130() -> None:
    with scripted_server(hang_after(piece("Hel"))) as server:
        session = on_terminal("chat", "a", "--once", "Hi", "--url", server.url, typed=(("Hel", b"\x03"),))
    assert session.code == 130
    assert "error: interrupted" in session.screen


def test_an_answer_cannot_command_the_terminal() -> None:
    with scripted_server(said("\x1b]0;owned\x07Hel\x1b[2Jlo.")) as server:
        session = on_terminal("chat", "a", "--once", "Hi", "--url", server.url)
    assert "]0;ownedHel[2Jlo." in session.screen
    assert "\x1b]0;" not in session.screen


def thought(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"reasoning_content": text}, "finish_reason": None}]}


def test_on_a_terminal_thoughts_are_dimmed_above_the_answer() -> None:
    with scripted_server(
        events(thought("So\x1b[2J "), thought("it is. "), piece("Yes"), piece("."))
    ) as server:
        session = on_terminal("chat", "a", "--once", "Hi", "--url", server.url)
    assert session.code == 0
    assert "\x1b[2mSo[2J \x1b[0m\x1b[2mit is. \x1b[0m\r\n\r\nYes.\r\n" in session.screen


def test_an_answer_of_thoughts_alone_ends_its_line_on_a_terminal() -> None:
    with scripted_server(events(thought("So"))) as server:
        session = on_terminal("chat", "a", "--once", "Hi", "--url", server.url)
    assert "\x1b[2mSo\x1b[0m\r\n[" in session.screen


def test_elsewhere_the_answer_is_printed_without_its_thoughts(capsys: Output) -> None:
    reaction = events(thought("So"), piece("Yes."))
    with scripted_server(reaction, reaction, reaction) as server:
        assert run(["chat", "a", "--once", "Hi", "--url", server.url]) == 0
        assert capsys.readouterr().out == "Yes.\n"
        assert run(["chat", "a", "--once", "Hi", "--url", server.url, "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["answers"]
    assert (answer["text"], answer["reasoning"]) == ("Yes.", "So")


def test_thoughts_count_in_the_speed_as_their_tokens_do() -> None:
    received = Answer("a")
    for chunk in (thought("So"), thought(" it"), piece("Yes")):
        received.add(parsed(json.dumps(chunk).encode(), ReceivedChunk))
    assert received.num_pieces == 3
    assert received.first_at is not None
    assert received.last_at is not None
    assert received.first_at < received.last_at


def test_on_a_terminal_two_answers_stand_side_by_side() -> None:
    with scripted_server(said("same"), said("same")) as server:
        session = on_terminal("chat", "--compare", "left", "right", "--once", "Hi", "--url", server.url)
    assert session.code == 0
    lines = session.screen.splitlines()
    assert [line for line in lines if line.count("same") == 2]
    assert [line for line in lines if "left" in line and "right" in line]
    assert [line for line in lines if line.count("abababababab") == 2]


def test_on_a_terminal_json_needs_a_prompt() -> None:
    session = on_terminal("chat", "a", "--json")
    assert session.code == 2
    assert "give --once PROMPT" in json.loads(session.screen)["error"]["message"]
