"""A client of engines that follow each other."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

import pytest

from server.engine.clients import EngineSocket
from server.errors import EngineRestarted, QueueFull
from server.protocol import engine_client
from server.protocol.engine_client import MAX_ASKED, MAX_UNASKED, EngineClient
from server.protocol.messages import (
    ClientMessage,
    DeltaState,
    EngineFacts,
    ErrorEvent,
    Event,
    Hello,
    Outputs,
    Pause,
    Progress,
    ResidencyAnswer,
    ResidencyQuery,
    SequenceProgress,
    Submit,
    TokenEvent,
    Welcome,
    decode_client_message,
    encode,
)
from server.protocol.request import Request, SamplingParams, token_ids_of
from tests.server.protocol.test_codec import BASE, RECORD

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


async def query_of(engine: EngineSocket) -> ResidencyQuery:
    """Return the next message of the only client, a question for the states of versions."""
    query = await next_of(engine)
    assert isinstance(query, ResidencyQuery)
    return query


def answer(engine: EngineSocket, client: EngineClient, query: ResidencyQuery, num_requests: int) -> None:
    """Answer with states that tell this answer from others."""
    states = (DeltaState("device", False, num_requests),) * len(query.versions)
    engine.send(client.identity, encode(ResidencyAnswer(query.call_id, states)))


def asking(client: EngineClient, tenant: str, numbers: Iterable[int]) -> asyncio.Task[tuple[DeltaState, ...]]:
    """Begin a call for the states of a tenant's versions."""
    return asyncio.create_task(client.residency_of([f"{tenant}/v@{number}" for number in numbers], tenant))


def tenants_in(query: ResidencyQuery) -> Counter[str]:
    return Counter(version.partition("/")[0] for version in query.versions)


def test_a_tenants_question_waits_for_one_step_however_many_calls_of_another_one_wait() -> None:
    async def main() -> None:
        client = EngineClient("http")
        engine = await welcomed(client, "inproc://states")
        flood = [asking(client, "many", [number]) for number in range(4 * MAX_ASKED)]
        under_way = await query_of(engine)
        assert tenants_in(under_way) == {"many": MAX_ASKED}
        one, some = asking(client, "one", [1]), asking(client, "some", range(MAX_ASKED))
        await asyncio.sleep(0)
        answer(engine, client, under_way, 1)
        query = await query_of(engine)
        shares = tenants_in(query)
        assert len(query.versions) == MAX_ASKED
        assert shares["one"] == 1
        assert min(shares["many"], shares["some"]) >= MAX_ASKED // 3
        answer(engine, client, query, 2)
        assert await one == (DeltaState("device", False, 2),)
        assert not some.done()
        assert not all(call.done() for call in flood)
        for number in (3, 4):
            answer(engine, client, await query_of(engine), number)
        assert {state.num_requests for state in await some} == {2, 3, 4}
        client.disconnect()
        assert len(await asyncio.gather(*flood, return_exceptions=True)) == len(flood)
        engine.close()

    asyncio.run(main())


def test_calls_for_the_same_versions_share_an_answer_that_is_newer_than_they_are() -> None:
    async def main() -> None:
        client = EngineClient("http")
        engine = await welcomed(client, "inproc://shared")
        first = [asking(client, "acme", range(3)) for _ in range(50)]
        under_way = await query_of(engine)
        later = [asking(client, "acme", [2, 1, 1]) for _ in range(50)]
        await asyncio.sleep(0)
        # Others wait for the answers of a client that leaves.
        first.pop().cancel()
        later.pop().cancel()
        answer(engine, client, under_way, 1)
        assert len(under_way.versions) == 3
        assert await asyncio.gather(*first) == [(DeltaState("device", False, 1),) * 3] * 49
        query = await query_of(engine)
        assert sorted(query.versions) == ["acme/v@1", "acme/v@2"]
        answer(engine, client, query, 2)
        assert await asyncio.gather(*later) == [(DeltaState("device", False, 2),) * 3] * 49
        client.disconnect()
        engine.close()

    asyncio.run(main())


def test_the_versions_that_a_tenants_calls_wait_for_are_bounded_and_others_find_room() -> None:
    async def main() -> None:
        client = EngineClient("http")
        engine = await welcomed(client, "inproc://bounded")
        calls = [
            asking(client, "many", range(start, start + MAX_ASKED))
            for start in range(0, MAX_UNASKED, MAX_ASKED)
        ]
        under_way = await query_of(engine)
        refused = [call for call in calls if call.done()]
        assert len(calls) // 3 < len(refused) < 2 * len(calls) // 3
        for call in refused:
            assert isinstance(call.exception(), QueueFull)
        # What clients that have left asked for counts until it is asked.
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        for number in range(MAX_UNASKED, MAX_UNASKED + 2 * MAX_ASKED, MAX_ASKED):
            again = asking(client, "many", range(number, number + MAX_ASKED))
        with pytest.raises(QueueFull):
            await again
        other = asking(client, "other", range(MAX_ASKED))
        await asyncio.sleep(0)
        answer(engine, client, under_way, 1)
        assert tenants_in(await query_of(engine))["other"] == MAX_ASKED // 2
        client.disconnect()
        with pytest.raises(EngineRestarted):
            await other
        engine.close()

    asyncio.run(main())


def test_calls_end_with_an_error_when_the_engine_gives_no_answer_in_time_or_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        client = EngineClient("http")
        engine = await welcomed(client, "inproc://silent")
        with monkeypatch.context() as patch:
            patch.setattr(engine_client, "STATES_S", 0.01)
            with pytest.raises(QueueFull, match="try again"):
                await asking(client, "acme", [1])
        assert (await query_of(engine)).versions == ("acme/v@1",)
        calls: list[Awaitable[object]] = [
            asking(client, "acme", range(2 * MAX_ASKED)),
            asking(client, "other", [1]),
            asyncio.create_task(client.metrics()),
            asyncio.create_task(client.residents()),
            client.load("load", RECORD),
        ]
        await asyncio.sleep(0)
        client.engine_lost((), (), ())
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [EngineRestarted] * len(calls)
        engine.close()
        # The next engine is asked as if none had been before.
        engine = await welcomed(client, "inproc://after")
        call = asking(client, "acme", [7])
        query = await query_of(engine)
        assert query.versions == ("acme/v@7",)
        answer(engine, client, query, 3)
        assert await call == (DeltaState("device", False, 3),)
        client.disconnect()
        engine.close()

    asyncio.run(main())
