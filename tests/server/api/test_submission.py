"""`POST /generate` with the application in the tests' process: ids of requests, and clients that leave early."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from server.api import generation
from server.api.json_io import ParsingTurns
from server.grammar import field_values
from server.grammar.answer_grammar import in_form
from server.grammar.grammar import any_object, requested
from server.metrics.metrics import FrontendMetrics
from server.protocol.engine_client import EngineClient, OnEvent
from server.protocol.request import Request
from server.tenants.loop_ledger import LoopLedger
from server.text.answer_form import AnswerForm, CallSyntax
from server.text.service import VariantText
from tests.server.helpers.http_app import HttpApp, with_engine
from tests.server.helpers.served import Family, make_family

WAIT_S = 240.0
# Ends only when it is cancelled: with this seed, sequences are long.
LONG = {"max_new_tokens": 200, "n": 100, "temperature": 2.0, "seed": 1}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("family"), seed=5, num_variants=0)


def test_the_engine_s_id_of_a_request_begins_with_the_client_s(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids: list[str] = []
    submit = EngineClient.submit

    def recorded(engine: EngineClient, request: Request, on_event: OnEvent) -> None:
        ids.append(request.id)
        submit(engine, request, on_event)

    monkeypatch.setattr(EngineClient, "submit", recorded)

    async def talk(app: HttpApp) -> None:
        for _ in range(2):
            body = {"prompt": "a", "max_new_tokens": 1}
            reply = await app.client.post("/generate", json=body, headers={"X-Request-Id": "mine"})
            assert reply.headers["X-Request-Id"] == "mine"

    with_engine(family.base, tmp_path / "registry", talk)
    assert len(set(ids)) == 2
    assert all(id.startswith("mine-") for id in ids)


def test_a_completion_says_whether_its_text_gets_special_tokens(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    async def recorded(
        text: VariantText, prompt: str, max_tokens: int, add_special_tokens: bool
    ) -> list[int]:
        asked.append(add_special_tokens)
        return [1]

    monkeypatch.setattr(VariantText, "encode", recorded)

    async def talk(app: HttpApp) -> None:
        for fields in ({}, {"add_special_tokens": False}, {"add_special_tokens": True}):
            body = {"model": "base", "prompt": "a", "max_tokens": 1, **fields}
            assert (await app.client.post("/v1/completions", json=body)).status_code == 200

    with_engine(family.base, tmp_path / "registry", talk)
    assert asked == [True, False, True]


def test_a_client_that_leaves_before_its_prompt_is_tokenized_is_never_submitted(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def endless(text: VariantText, *_: Any) -> list[int]:
        begun.set()
        await asyncio.sleep(WAIT_S)
        return []

    monkeypatch.setattr(VariantText, "encode", endless)

    async def talk(app: HttpApp) -> None:
        asking = asyncio.create_task(app.client.post("/generate", json={"prompt": "a"}))
        await begun.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert app.engine_client.num_open == 0
        assert app.service.num_in_flight == 0

    with_engine(family.base, tmp_path / "registry", talk)


def test_a_client_that_leaves_after_submission_ends_its_request(family: Family, tmp_path: Path) -> None:
    async def talk(app: HttpApp) -> None:
        body = {"prompt": "a", **LONG}
        asking = asyncio.create_task(app.client.post("/generate", json=body))
        while not app.engine_client.num_open:
            await asyncio.sleep(0.001)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        ended = 'peraxis_variant_requests_total{finish_reason="cancelled",variant="base"} 1.0'
        while ended not in (await app.client.get("/metrics")).text:
            await asyncio.sleep(0.02)

    with_engine(family.base, tmp_path / "registry", talk)


@pytest.mark.parametrize("num_properties", [1, 200])
@pytest.mark.parametrize("kind", ["json", "fields"])
def test_large_tools_are_read_beside_the_event_loop_and_small_ones_on_it(
    kind: Literal["json", "fields"], num_properties: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schemas of tools are read for the grammar of an answer, and for types of arguments that come one by one."""
    threads: list[int] = []

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            threads.append(threading.get_ident())
            return function(*args)

        return call

    monkeypatch.setattr(generation, "in_form", noted(in_form))
    monkeypatch.setattr(field_values, "_argument_types", noted(field_values._argument_types))
    properties = {f"p{number}": {"type": "integer"} for number in range(num_properties)}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    asked = requested(any_object(), [tool])
    form = AnswerForm(calls=CallSyntax(kind, "<call>", "<call>", "\n", "</call>", ("<k>", "=", "</k>")))
    service: Any = SimpleNamespace(parsing=ParsingTurns(LoopLedger(FrontendMetrics().tenant_seconds_total)))
    call: Any = SimpleNamespace(requested=asked, tenant=SimpleNamespace(name="acme"))

    async def talk() -> None:
        made, types = await generation._formed(service, call, form)
        assert made.grammar is not None
        assert made.grammar.text != any_object().text
        num_before = len(threads)
        if kind == "fields":
            assert types.of("f")["p0"] == {"integer"}
            assert types.of("none") == {}
        assert num_before == len(threads) == (2 if kind == "fields" else 1)

    asyncio.run(talk())
    assert {each == threading.get_ident() for each in threads} == {num_properties == 1}
