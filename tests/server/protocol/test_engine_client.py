"""A client of engines that follow each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from server.engine.clients import EngineSocket
from server.errors import EngineRestarted
from server.protocol.engine_client import EngineClient
from server.protocol.messages import (
    ClientMessage,
    EngineFacts,
    ErrorEvent,
    Event,
    Hello,
    Outputs,
    Pause,
    Progress,
    SequenceProgress,
    Submit,
    TokenEvent,
    Welcome,
    decode_client_message,
    encode,
)
from server.protocol.request import Request, SamplingParams, token_ids_of
from tests.server.protocol.test_codec import BASE

FACTS = EngineFacts(BASE, 4096, 1 << 20, 8)
REQUEST = Request("r", "acme", None, None, token_ids_of([1]), 300, SamplingParams())


async def next_of(engine: EngineSocket) -> ClientMessage:
    """Return the next message of the only client."""
    while not (received := engine.receive(0.0)):
        await asyncio.sleep(0.001)
    ((_, _, raw),) = received
    return decode_client_message(raw)


async def welcomed(client: EngineClient, address: str) -> EngineSocket:
    """Start an engine, and have a client connect to it."""
    engine = EngineSocket(address)
    client.connect(address)
    assert await next_of(engine) == Hello()
    engine.send(client.identity, encode(Welcome(FACTS)))
    await client.welcomed
    return engine


def test_a_request_that_pauses_does_so_in_the_next_engine() -> None:
    async def main() -> None:
        client, arrived = EngineClient("http", resume_s=3600), asyncio.Event()
        engine = await welcomed(client, "inproc://first")
        client.submit(REQUEST, lambda event: arrived.set())
        assert isinstance(await next_of(engine), Submit)
        engine.send(client.identity, encode(Outputs((("r", TokenEvent(0, 7)),))))
        await arrived.wait()
        client.set_paused("r", True)
        assert await next_of(engine) == Pause("r", is_paused=True)
        client.engine_lost((), (), ())
        engine.close()
        engine = await welcomed(client, "inproc://second")
        again = await next_of(engine)
        assert isinstance(again, Submit)
        assert isinstance(again.progress, Progress)
        assert again.progress.sequences == (SequenceProgress(token_ids_of([7])),)
        assert again.progress.is_paused
        client.set_paused("r", False)
        assert await next_of(engine) == Pause("r", is_paused=False)
        client.disconnect()
        engine.close()

    asyncio.run(main())


def test_a_request_that_is_looked_at_too_early_ends_in_time_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loop's timer counts from the time of its turn, which may be well before that of the call."""

    async def main() -> None:
        client, events = EngineClient("http", resume_s=0.1), list[Event]()
        engine = await welcomed(client, "inproc://only")
        client.submit(REQUEST, events.append)
        loop = asyncio.get_running_loop()
        call_later = loop.call_later

        def early(delay: float, call: Callable[[], None]) -> asyncio.TimerHandle:
            return call_later(delay / 2, call)

        with monkeypatch.context() as patch:
            patch.setattr(loop, "call_later", early)
            client.engine_lost((), (), ())
        while not events:
            await asyncio.sleep(0.01)
        (event,) = events
        assert isinstance(event, ErrorEvent)
        assert isinstance(event.error, EngineRestarted)
        engine.close()

    asyncio.run(main())
