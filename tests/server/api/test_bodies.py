"""JSON bodies over HTTP: slow ones, endless ones, and what their errors name."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Awaitable, Callable, Coroutine
from random import Random
from typing import Annotated, Any

import pytest
from fastapi import Depends, FastAPI
from msgspec import Struct

from server.api import conversations, errors, json_io
from server.api.json_io import MAX_BYTES, json_body
from server.api.schemas import ChatBody, CompletionBody
from server.errors import InvalidRequest
from server.metrics.metrics import FrontendMetrics
from server.tenants.loop_ledger import LoopLedger
from server.tenants.tenant import UNAUTHENTICATED
from tests.server.helpers.web import Web, answer, code_of, talk

MEBIBYTE = 1 << 20


class Text(Struct, forbid_unknown_fields=True):
    """A body with one field."""

    text: str

    def __post_init__(self) -> None:
        parsed_by[len(self.text)] = threading.get_ident()


# Threads by the length of the text that they have parsed.
parsed_by: dict[int, int] = {}


def make_ledger() -> LoopLedger:
    """Make a ledger in which no second passes."""
    return LoopLedger(FrontendMetrics().tenant_seconds_total, lambda: 0.0)


def application(num_bytes: int = 64 * MEBIBYTE) -> Callable[..., Awaitable[None]]:
    """Return an application that answers with the length of a body's text."""
    app = FastAPI()
    errors.install(app)
    json_io.install_bodies(app, json_io.ParsingTurns(make_ledger()), num_bytes)

    @app.post("/")
    async def length(body: Annotated[Text, Depends(json_body(Text))]) -> int:
        return len(body.text)

    async def with_id(scope: Any, receive: Any, send: Any) -> None:
        tenant = dict(scope["headers"]).get(b"x-tenant", b"acme").decode()
        scope.setdefault("state", {}).update(request_id="test", tenant=tenant, caller=UNAUTHENTICATED)
        await app(scope, receive, send)

    return with_id


def post(body: bytes, length: int | None = None, tenant: str = "acme") -> bytes:
    """Return a request of a tenant whose body has, or only announces, a length."""
    announced = len(body) if length is None else length
    head = (
        f"POST / HTTP/1.1\r\nHost: t\r\nX-Tenant: {tenant}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {announced}\r\n\r\n"
    )
    return head.encode() + body


def text(num_bytes: int) -> bytes:
    return json.dumps({"text": "a" * num_bytes}).encode()


def run(what: Callable[[Web], Coroutine[Any, Any, None]], num_bytes: int = 64 * MEBIBYTE) -> None:
    talk(what, application(num_bytes))


def test_a_body_is_parsed() -> None:
    async def what(web: Web) -> None:
        assert await web.ask(post(text(3 * MEBIBYTE))) == (200, str(3 * MEBIBYTE).encode())

    run(what)


def test_a_body_may_begin_with_a_byte_order_mark() -> None:
    async def parse(web: Web) -> None:
        assert await web.ask(post(b"\xef\xbb\xbf" + text(7))) == (200, b"7")

    run(parse)


def test_a_body_that_never_ends_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_io, "SLOW_S", 0.2)

    async def what(web: Web) -> None:
        reader, writer = await web.connect(post(b'{"text": "', 100))
        assert code_of(await answer(reader)) == (408, "request_timeout")
        assert await reader.read() == b""
        writer.close()

    run(what)


def test_a_body_that_trickles_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_io, "SLOW_S", 0.2)

    async def what(web: Web) -> None:
        reader, writer = await web.connect(post(b'{"text": "', MEBIBYTE))
        reply = asyncio.create_task(answer(reader))
        while not reply.done():
            writer.write(b"a")
            await asyncio.sleep(0.01)
        assert code_of(await reply) == (408, "request_timeout")
        writer.close()

    run(what)


def test_a_fast_body_that_stops_before_its_end_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_io, "JSON_S", 0.3)
    monkeypatch.setattr(json_io, "SLOW_BYTES", 1)

    async def what(web: Web) -> None:
        reader, writer = await web.connect(post(text(MEBIBYTE), 2 * MEBIBYTE))
        reply = asyncio.create_task(answer(reader))
        while not reply.done():
            writer.write(b" ")
            await asyncio.sleep(0.01)
        assert code_of(await reply) == (408, "request_timeout")
        writer.close()

    run(what)


def test_many_bodies_without_end_are_refused_and_small_ones_still_read() -> None:
    async def what(web: Web) -> None:
        pending = [await web.connect(post(b'{"text": "' + b"a" * MEBIBYTE, MAX_BYTES)) for _ in range(6)]
        replies = [asyncio.create_task(answer(reader)) for reader, _ in pending]
        done, waiting = await asyncio.wait(replies, return_when=asyncio.FIRST_COMPLETED)
        assert code_of(done.pop().result()) == (503, "overloaded")
        assert await web.ask(post(text(1000))) == (200, b"1000")
        for _, writer in pending:
            writer.close()
        await asyncio.gather(*waiting, return_exceptions=True)
        # What was reserved is given back.
        for _ in range(4):
            assert await web.ask(post(text(3 * MEBIBYTE))) == (200, str(3 * MEBIBYTE).encode())

    run(what, 8 * MEBIBYTE)


def test_a_tenant_with_many_bodies_leaves_another_s_a_share() -> None:
    async def what(web: Web) -> None:
        pending = [await web.connect(post(b'{"text": "' + b"a" * MEBIBYTE, MAX_BYTES)) for _ in range(6)]
        replies = asyncio.as_completed([answer(reader) for reader, _ in pending])
        # Four of them are half of the budget, and stay.
        for reply in itertools.islice(replies, 2):
            assert code_of(await reply) == (503, "overloaded")
        found = await web.ask(post(text(MEBIBYTE), tenant="other"))
        for _, writer in pending:
            writer.close()
        await asyncio.gather(*replies, return_exceptions=True)
        assert found == (200, str(MEBIBYTE).encode())

    run(what, 8 * MEBIBYTE)


def test_a_large_body_is_parsed_beside_the_event_loop() -> None:
    async def what(web: Web) -> None:
        for num_bytes in (1000, 100_000):
            assert (await web.ask(post(text(num_bytes))))[0] == 200
        assert parsed_by[1000] == threading.get_ident() != parsed_by[100_000]

    run(what)


@pytest.mark.parametrize("piece", ["{}", "[1]", "1,", '\\"'])
def test_a_body_of_many_small_values_is_parsed_beside_the_event_loop(piece: str) -> None:
    """Also where they stand in a text, which may be a schema."""

    async def what(web: Web) -> None:
        for count in (100, 401):
            content = f'{{"text": "{piece * count}"}}'.encode()
            assert (await web.ask(post(content)))[0] == 200
        here, beside = (parsed_by[len(json.loads(f'"{piece * count}"'))] for count in (100, 401))
        assert here == threading.get_ident() != beside

    run(what)


def rests_of(
    monkeypatch: pytest.MonkeyPatch, ledger: LoopLedger, num_cores: int, num_bytes: int = 0
) -> list[float]:
    """Return the seconds for which the second, third and fourth calls of a tenant rest, where each one works for 0.1 s
    and the clock goes on by 0.05 s meanwhile.
    """
    now, rests = [100.0], list[float]()

    async def sleep(seconds: float) -> None:
        rests.append(round(seconds, 6))
        now[0] += seconds

    monkeypatch.setattr(asyncio, "sleep", sleep)
    turns = json_io.ParsingTurns(ledger, num_cores, lambda: now[0])

    async def call() -> None:
        async with turns.turn("acme", num_bytes):
            ledger.total.labels("acme", "thread").inc(0.1)
            now[0] += 0.05

    async def talk() -> None:
        for _ in range(3):
            await call()
        # Work that is charged behind a call's end counts, up to a bound.
        ledger.total.labels("acme", "thread").inc(9.0)
        await call()

    asyncio.run(talk())
    return rests


def test_a_tenant_of_large_bodies_rests_by_what_its_threads_work_while_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone, shared = make_ledger(), make_ledger()
    for ledger in (alone, shared):
        ledger.charge("acme", 0.01)
    assert rests_of(monkeypatch, alone, 2) == []
    shared.charge("other", 0.01)
    assert rests_of(monkeypatch, shared, 16) == [0.15, 0.15, json_io.MAX_REST_S]
    assert rests_of(monkeypatch, shared, 2) == [0.75, 0.75, json_io.MAX_REST_S]
    # Reading takes as long again.
    assert rests_of(monkeypatch, shared, 16, 50_000_000) == [0.35, 0.35, json_io.MAX_REST_S]


def test_a_call_that_rests_lets_those_of_other_tenants_begin() -> None:
    ledger, order = make_ledger(), list[str]()
    ledger.charge("other", 0.01)
    turns = json_io.ParsingTurns(ledger)

    async def call(tenant: str) -> None:
        async with turns.turn(tenant):
            order.append(tenant)
            ledger.total.labels(tenant, "thread").inc(0.2)

    async def talk() -> None:
        await asyncio.gather(call("acme"), call("acme"), call("other"))

    asyncio.run(talk())
    assert order == ["acme", "other", "acme"]


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 7, 64])
def test_values_are_counted_alike_wherever_pieces_end(
    piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "PIECE_BYTES", piece_bytes)
    draw = Random(1)
    for _ in range(2000):
        text = bytes(draw.choices(b'[{"\\ab,', k=draw.randrange(40)))
        plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")
        outside = b"".join(plain.split(b'"')[::2])
        num_strings = (plain.count(b'"') + 1) // 2
        assert conversations.num_values(text) == num_strings + outside.count(b"[") + outside.count(b"{"), text


def chat(**fields: bytes) -> bytearray:
    """Return a body of a chat, with fields as they are."""
    members = {"model": b'"m"', "messages": b'[{"role": "user", "content": "hi"}]', **fields}
    return bytearray(
        b"{%s}" % b",".join(b'"%s":%s' % (name.encode(), value) for name, value in members.items())
    )


NUMBERS = b"[%s1]" % (b"1e9," * (MEBIBYTE // 2))
TOOLS = b'[{"type": "function", "function": {"name": "f", "parameters": {"x": %s}}}]' % NUMBERS


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        (chat(tools=TOOLS), "tools", "'tools' has .* bytes, more than 1048576: make it shorter"),
        (chat(of_tomorrow=NUMBERS), None, "'of_tomorrow' has .* bytes, more than 1048576"),
        (chat(messages=b'[{"role": "user", "content": %s}]' % NUMBERS), "messages", "more than 131072 values"),
        (chat()[:-1] + b',"tools":%s,"tools":null}' % TOOLS, None, "fields that are given again: leave them out"),
        (chat(of_tomorrow=b" " * 2 * MEBIBYTE + b"1"), None, "spaces between fields"),
    ],
)  # fmt: skip
def test_what_would_take_long_to_parse_is_refused_before(
    body: bytearray, param: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_io, "_decoder", lambda _: pytest.fail("it was parsed"))
    with pytest.raises(InvalidRequest, match=reason) as refused:
        json_io.parse(ChatBody, body)
    assert refused.value.param == param


def test_long_texts_and_lists_of_ids_are_parsed() -> None:
    text = "a, [b] {c}" * (MEBIBYTE // 4)
    messages = json.dumps([{"role": "user", "content": text}]).encode()
    (message,) = json_io.parse(ChatBody, chat(messages=messages)).messages
    assert message["content"] == text
    body = json_io.parse(CompletionBody, bytearray(b'{"model": "m", "prompt": [%s1]}' % (b"1," * MEBIBYTE)))
    (ids,) = body.prompts()
    assert len(ids) == MEBIBYTE + 1


def test_an_announced_length_over_the_limit_is_refused_before_a_byte_is_read() -> None:
    async def what(web: Web) -> None:
        assert code_of(await web.ask(post(b"", MAX_BYTES + 1))) == (413, "too_large")

    run(what)


def test_a_field_of_openai_is_answered_with_the_name_that_it_has_here() -> None:
    message = "Object contains unknown field `max_tokens`"
    assert str(json_io.invalid(message, ("prompt", "max_new_tokens"))).endswith("use max_new_tokens")
    assert str(json_io.invalid(message, ("prompt",))).endswith("remove it")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("Object contains unknown field `max_tokens`", "max_tokens"),
        ("Object contains unknown field `weight` - at `$.messages[0]`", "messages"),
        ("Object contains unknown field `" + "a" * 1000 + "`", "a" * 80),
        ("Expected `int`, got `bool` - at `$.n`", "n"),
        ("Expected `str`, got `int` - at `$.messages[3].content`", "messages"),
        ("Expected `object`, got `array`", None),
        ("give either prompt or messages", None),
    ],
)
def test_the_error_of_a_body_names_the_field(message: str, param: str | None) -> None:
    error = json_io.invalid(message)
    assert isinstance(error, InvalidRequest)
    assert error.param == param
    assert len(str(error)) < 200
