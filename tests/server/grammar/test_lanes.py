"""Lanes beside tenants whose grammars never return, kill workers, or fill them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from server.errors import InvalidRequest
from server.grammar import lanes as standing
from server.grammar.grammar import Grammar, any_object, matching_schema
from server.grammar.lanes import Lanes, Standing
from server.grammar.matching import NewSampled, Vocabulary
from server.grammar.service import MaskFeed
from server.text.service import TextService, VariantText
from server.workers import pool as variant_work
from server.workers.pool import WorkerPool
from server.workers.worker_main import Limits
from tests.server.grammar.helpers.masked_draws import Drawing, MaskReceiver
from tests.server.helpers.texts import Texts, make_texts

EOS = 257
HONEST = ("one", "two", "three")
LETTERS = matching_schema({"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 30, "maxItems": 30})


def endless(number: int) -> Grammar:
    """Return one of many grammars that llguidance never compiles."""
    primes = [{"type": "integer", "multipleOf": prime} for prime in (9973, 9967, 9949, 9941)]
    return matching_schema({"allOf": [*primes, {"type": "integer", "maximum": 10**9 + number}]})


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return make_texts(tmp_path_factory.mktemp("texts"))


class LaneUsers:
    """Requests of tenants in lanes, without trials: as if those of hostile grammars had passed."""

    def __init__(self, service: TextService) -> None:
        self.lanes = Lanes(Standing())
        self._service = service
        self._receiver = MaskReceiver()
        self._num_requests = 0

    async def text(self, tenant: str) -> VariantText:
        return await self._service.of(None, tenant)

    async def drawing(self, tenant: str, grammar: Grammar) -> Drawing:
        """Begin a request; raises as the lane does."""
        text = await self.text(tenant)
        self._num_requests += 1
        name = f"request-{self._num_requests}"
        vocabulary = Vocabulary(
            text.tokenizer_key, text.num_embeddings, tuple(sorted(text.generation.eos_token_ids))
        )
        place = self.lanes.enter(text, vocabulary)
        try:
            opening = await place.advance(NewSampled(f"{name}/opening", grammar, 0, ()), ())
        except BaseException:
            place.leave()
            raise
        drawing = Drawing(self._receiver, MaskFeed(self._receiver, place, grammar, opening), name, EOS)
        drawing.start()
        return drawing

    def begin(self, tenant: str, grammar: Grammar) -> asyncio.Task[Drawing]:
        return asyncio.create_task(self.drawing(tenant, grammar))

    async def honest_drawings(self) -> list[Drawing]:
        """Begin requests of as many tenants as there are lanes, and have each advance."""
        return [await self.drawing(tenant, LETTERS) for tenant in HONEST]

    async def until_late(self, num_lanes: int) -> None:
        """Wait until calls in this many lanes are late."""
        while sum(not lane.on_time.is_set() for lane in self.lanes.lanes) < num_lanes:
            await asyncio.sleep(0.01)

    async def assert_drawn(self, drawings: list[Drawing], begun: list[list[int]]) -> None:
        """Finish the outputs of honest tenants, and compare them with those of requests that begin now."""
        for seed, (drawing, tokens) in enumerate(zip(drawings, begun, strict=True)):
            whole = await drawing.draw(0, seed, begun=tokens)
            another = await self.drawing(HONEST[0], LETTERS)
            assert await another.draw(0, seed, len(tokens)) == tokens
            assert whole == await another.draw(0, seed, begun=tokens)
            assert len(json.loads(await (await self.text("one")).decode(whole))) == 30


def run(texts: Texts, test: Callable[[LaneUsers], Awaitable[None]]) -> None:
    async def body(service: TextService, pool: WorkerPool) -> None:
        users = LaneUsers(service)
        try:
            await test(users)
        finally:
            await users.lanes.close()

    texts.run(body)


async def begun(drawings: list[Drawing]) -> list[list[int]]:
    return [await drawing.draw(0, seed, 10) for seed, drawing in enumerate(drawings)]


def kill_soon_and_pause_long(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(variant_work, "WORK_LIMITS", Limits(1 << 30, 1.0))
    patch.setattr(standing, "MIN_PAUSE_S", 600.0)
    patch.setattr(standing, "MAX_PAUSE_S", 600.0)


def test_grammars_that_never_return_hold_up_no_other_tenant_and_leave_one_lane(
    texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variant_work, "WORK_S", 600.0)
    monkeypatch.setattr(variant_work, "WORK_LIMITS", Limits(1 << 40, 600.0))

    async def test(users: LaneUsers) -> None:
        drawings = await users.honest_drawings()
        tokens = await begun(drawings)
        hostile = [users.begin(f"hostile-{n % 2}", endless(n)) for n in range(8)]
        await users.until_late(2)
        await users.assert_drawn(drawings, tokens)
        # On a busy machine an honest call may have been one of the two late ones before.
        await users.until_late(2)
        assert sum(not lane.on_time.is_set() for lane in users.lanes.lanes) == 2
        assert not any(task.done() for task in hostile)
        await users.lanes.close()
        await asyncio.gather(*hostile, return_exceptions=True)

    run(texts, test)


def test_a_grammar_that_kills_a_worker_is_refused_from_then_on_and_others_go_on_token_for_token(
    texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_soon_and_pause_long(monkeypatch)

    async def test(users: LaneUsers) -> None:
        drawings = await users.honest_drawings()
        tokens = await begun(drawings)
        known = await users.drawing("hostile", any_object())
        with pytest.raises(InvalidRequest, match="simplify the schema") as killed:
            await users.drawing("hostile", endless(0))
        with pytest.raises(InvalidRequest) as refused:
            await users.drawing("hostile", endless(0))
        assert str(refused.value) == str(killed.value)
        with pytest.raises(InvalidRequest, match="try again in"):
            await users.drawing("hostile", endless(1))
        assert await known.draw(0, 1, 5)
        await users.assert_drawn(drawings, tokens)

    run(texts, test)


def test_grammars_of_one_tenant_that_kill_workers_kill_one_and_then_wait(
    texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_soon_and_pause_long(monkeypatch)

    async def test(users: LaneUsers) -> None:
        hostile = [users.begin("hostile", endless(number)) for number in range(6)]
        refusals = [str(error) for error in await asyncio.gather(*hostile, return_exceptions=True)]
        assert sum("simplify the schema, or try again in" in reason for reason in refusals) == 5
        assert sum(reason.endswith(": simplify the schema") for reason in refusals) == 1

    run(texts, test)


def test_tenants_share_no_lane_while_there_are_enough(texts: Texts) -> None:
    async def test(users: LaneUsers) -> None:
        for _ in range(6):
            await users.drawing("one", any_object())
        # One lane is left to others.
        assert sum(lane.serves("one") for lane in users.lanes.lanes) < len(users.lanes.lanes)
        await users.drawing("two", any_object())
        assert any(lane.serves("two") for lane in users.lanes.lanes)
        assert not any(lane.serves("one") and lane.serves("two") for lane in users.lanes.lanes)

    run(texts, test)
