"""The grammar service: sequences that stay with a worker, workers that die, and grammars that explode."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from deltastore.errors import PeraxisError
from server.errors import InvalidRequest
from server.grammar import lanes
from server.grammar import service as service_module
from server.grammar.grammar import Grammar, any_object, matching_schema
from server.grammar.service import GrammarService
from server.text.service import TextService, VariantText
from server.workers import pool as variant_work
from server.workers.pool import WorkerPool
from tests.helpers.tiny_models import CHAT_TEMPLATE, make_tokenizer
from tests.server.grammar.helpers.hostile_work import never_returns
from tests.server.grammar.helpers.masked_draws import Drawing, MaskReceiver
from tests.server.helpers.texts import Texts, files_of, make_texts
from tests.server.helpers.worker_processes import workers_of

EOS = 257
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["cat", "dog"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 5},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
EXPLODING: tuple[dict[str, Any], ...] = (
    {"type": "string", "pattern": "(a|ab|abc|.*)*" * 200},
    {"allOf": [{"type": "string", "pattern": f".*{letter}.{{20}}"} for letter in "abcdefghij"]},
    {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "pattern": f".*a.{{{i}}}"} for i in range(2000)},
    },
    {"$ref": "#"},
    {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
)
HARMLESS: tuple[dict[str, Any], ...] = (
    {
        "type": "array",
        "items": {"type": "array", "items": {"enum": [0]}, "maxItems": 10**6},
        "maxItems": 10**6,
    },
    {"type": "string", "pattern": "(((a{1,100}){1,100}){1,100}){1,100}"},
    {"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"},
    {"type": "string", "minLength": 10**6, "maxLength": 2 * 10**6},
    {"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"},
)
# llguidance computes without end.
ENDLESS = {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (9973, 9967, 9949, 9941)]}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return make_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def own_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return files_of(make_tokenizer(2, CHAT_TEMPLATE), tmp_path_factory.mktemp("own"))


class Grammars:
    """A grammar service, and short calls for tests."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self.receiver = MaskReceiver()
        self.service = GrammarService(self.receiver, pool)
        self._num_requests = 0

    async def drawing(self, text: VariantText, grammar: Grammar, n: int = 1) -> Drawing:
        constraint = await self.service.open(text, grammar)
        self._num_requests += 1
        drawing = Drawing(self.receiver, constraint.feed(), f"request-{self._num_requests}", EOS, n)
        drawing.start()
        return drawing

    async def assert_serves(self, text: VariantText, seed: int = 0) -> None:
        """Draw an output and check it against the schema."""
        tokens = await (await self.drawing(text, matching_schema(SCHEMA))).draw(0, seed)
        jsonschema_rs.validate(SCHEMA, json.loads(await text.decode(tokens)))


def run(texts: Texts, test: Callable[[TextService, Grammars], Awaitable[None]]) -> None:
    async def body(service: TextService, pool: WorkerPool) -> None:
        grammars = Grammars(pool)
        try:
            await test(service, grammars)
        finally:
            await grammars.service.close()

    texts.run(body)


def test_every_sequence_of_a_request_matches_its_schema(texts: Texts) -> None:
    async def test(service: TextService, grammars: Grammars) -> None:
        text = await service.of(None, "default")
        drawing = await grammars.drawing(text, matching_schema(SCHEMA), n=4)
        drawn = await asyncio.gather(*(drawing.draw(index, seed=index) for index in range(4)))
        for tokens in drawn:
            jsonschema_rs.validate(SCHEMA, json.loads(await text.decode(tokens)))
        assert len(set(map(tuple, drawn))) == 4

    run(texts, test)


def test_a_variant_s_own_tokens_and_rows_are_those_of_its_masks(
    texts: Texts, own_files: dict[str, bytes]
) -> None:
    record = texts.publish(own_files)

    async def test(service: TextService, grammars: Grammars) -> None:
        text = await service.of(record, "default")
        constraint = await grammars.service.open(text, any_object())
        assert len(constraint.feed().first_mask) == 4 * -(-text.num_embeddings // 32)
        await grammars.assert_serves(text)

    run(texts, test)


def test_a_grammar_is_tried_once_for_a_vocabulary(texts: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(service: TextService, grammars: Grammars) -> None:
        await grammars.service.open(await service.of(None, "one"), any_object())
        calls: list[object] = []

        async def refused(*args: object, **kwargs: object) -> None:
            calls.append(args)

        # Only where grammars are tried: a lane is asked each time.
        monkeypatch.setattr(grammars.pool, "run", refused)
        await grammars.service.open(await service.of(None, "another"), any_object())
        assert not calls

    run(texts, test)


def test_a_tenant_s_many_grammars_have_no_other_s_tried_again(
    texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of five grammars' first masks, 40 bytes each.
    monkeypatch.setattr(service_module, "CACHE_BYTES", 200)

    async def test(service: TextService, grammars: Grammars) -> None:
        honest, hostile = await service.of(None, "honest"), await service.of(None, "hostile")
        await grammars.service.open(honest, matching_schema({"type": "integer"}))
        for number in range(8):
            await grammars.service.open(hostile, matching_schema({"type": "integer", "minimum": number}))
        tried: list[object] = []
        run = grammars.pool.run

        async def counted(*args: Any, **kwargs: Any) -> Any:
            tried.append(args)
            return await run(*args, **kwargs)

        # Only where grammars are tried: a lane is asked each time.
        monkeypatch.setattr(grammars.pool, "run", counted)
        await grammars.service.open(honest, matching_schema({"type": "integer"}))
        assert not tried
        await grammars.service.open(hostile, matching_schema({"type": "integer", "minimum": 0}))
        assert tried

    run(texts, test)


def test_a_worker_that_was_killed_loses_no_sequence(texts: Texts) -> None:
    async def test(service: TextService, grammars: Grammars) -> None:
        text = await service.of(None, "default")
        endless = matching_schema(
            {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 50, "maxItems": 50}
        )
        drawings = [await grammars.drawing(text, endless) for _ in range(4)]
        tokens = await asyncio.gather(*(drawing.draw(0, seed, 10) for seed, drawing in enumerate(drawings)))
        for worker in workers_of(os.getpid()):
            worker.send_signal(signal.SIGKILL)
        for drawing, begun in zip(drawings, tokens, strict=True):
            whole = await drawing.draw(0, seed=9, begun=begun)
            assert len(json.loads(await text.decode(whole))) == 50

    run(texts, test)


def test_a_schema_without_end_is_one_bad_request_and_disturbs_no_other(
    texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However long the calls between two of the tenant's take.
    monkeypatch.setattr(variant_work, "MIN_PAUSE_S", 1000.0)
    monkeypatch.setattr(variant_work, "MAX_PAUSE_S", 1000.0)

    async def test(service: TextService, grammars: Grammars) -> None:
        hostile, other = await service.of(None, "hostile"), await service.of(None, "other")
        drawing = await grammars.drawing(other, matching_schema(SCHEMA))
        trying = asyncio.create_task(grammars.service.open(hostile, matching_schema(ENDLESS)))
        await drawing.draw(0, seed=3)
        with pytest.raises(InvalidRequest, match="simplify the schema") as refused:
            await trying
        assert refused.value.param == "response_format"
        with pytest.raises(InvalidRequest, match="try again in"):
            await grammars.service.open(hostile, matching_schema(ENDLESS))
        await grammars.assert_serves(other)

    run(texts, test)


def test_a_schema_that_only_a_lane_cannot_compile_is_one_bad_request_that_is_remembered(
    texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(service: TextService, grammars: Grammars) -> None:
        hostile, other = await service.of(None, "hostile"), await service.of(None, "other")
        await grammars.assert_serves(other)
        with monkeypatch.context() as patch:
            patch.setattr(lanes, "make_matcher", never_returns)
            with pytest.raises(InvalidRequest, match="not done after 5 s: simplify the schema") as killed:
                await grammars.service.open(hostile, any_object())
        with pytest.raises(InvalidRequest) as refused:
            await grammars.service.open(hostile, any_object())
        assert str(refused.value) == str(killed.value)
        assert killed.value.param == refused.value.param == "response_format"
        await grammars.assert_serves(other)

    run(texts, test)


def test_a_schema_that_explodes_is_one_bad_request(texts: Texts) -> None:
    async def test(service: TextService, grammars: Grammars) -> None:
        text = await service.of(None, "default")
        for schema in EXPLODING:
            with pytest.raises(InvalidRequest) as refused:
                await grammars.service.open(text, matching_schema(schema))
            assert refused.value.param == "response_format"
        await grammars.assert_serves(text)

    run(texts, test)


def test_a_schema_that_only_looks_hostile_is_served(texts: Texts) -> None:
    async def test(service: TextService, grammars: Grammars) -> None:
        text = await service.of(None, "default")
        for schema in HARMLESS:
            drawing = await grammars.drawing(text, matching_schema(schema))
            assert await drawing.draw(0, seed=1, num_tokens=20)

    run(texts, test)


def test_schemas_that_are_too_large_or_too_deep_reach_no_worker() -> None:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(200):
        deep = {"type": "array", "items": deep}
    with pytest.raises(InvalidRequest, match="nested more than 100 deep"):
        matching_schema(deep)
    with pytest.raises(InvalidRequest, match="more than 262144"):
        matching_schema({"enum": [f"value-{number}" for number in range(100_000)]})


def test_closing_ends_sequences_with_one_clear_error(texts: Texts) -> None:
    async def test(service: TextService, grammars: Grammars) -> None:
        text = await service.of(None, "default")
        drawing = await grammars.drawing(text, any_object())
        await grammars.service.close()
        with pytest.raises(PeraxisError, match="shutting down"):
            await drawing.draw(0, seed=1)

    run(texts, test)


def test_a_schema_s_options_for_llguidance_are_left_out(tmp_path: Path) -> None:
    lenient = matching_schema({"x-guidance": {"lenient": True}, "type": "object"})
    assert lenient.text == matching_schema({"type": "object"}).text
