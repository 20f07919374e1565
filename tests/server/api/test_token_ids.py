"""Token ids in bodies: parsed into int32, checked before the engine gets any, and in little memory."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from dataclasses import replace as replace_fields
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from server.api.json_io import MAX_BYTES, parse
from server.api.schemas import CompletionBody, DetokenizeBody
from server.errors import InvalidRequest
from server.model.loader import PAGE_TOKENS
from server.protocol.engine_client import EngineClient, OnEvent
from server.protocol.request import HASH_BYTES, PageHashes, Request, TokenIds, token_ids_of
from tests.server.helpers.http_app import HttpApp, with_engine
from tests.server.helpers.served import make_family

# Above the body, while it is parsed and afterwards.
MAX_PEAK_BYTES = 20_000_000
HEAD = b'{"model": "base \\\\ and others", "%s": '


def full_body(field: bytes, item: bytes, last: bytes = b"1") -> bytearray:
    """Return the largest body with a list of an item in a field."""
    head, tail = HEAD % field + b"[", last + b"]}"
    num_items = (MAX_BYTES - len(head) - len(tail)) // (len(item) + 1)
    return bytearray(head + (item + b",") * num_items + tail)


@pytest.mark.parametrize("item", [b"1", b"300", b"128000", b"  7", b"[" + b"5," * 7999 + b"5]"], ids=len)
def test_eight_mebibytes_of_ids_take_little_beside_them(item: bytes) -> None:
    last = item if item.startswith(b"[") else b"1"
    body = full_body(b"prompt", item, last)
    tracemalloc.start()
    parsed = parse(CompletionBody, body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(map(len, parsed.prompts())) == body.partition(b"[")[2].count(b",") + 1
    assert peak < MAX_PEAK_BYTES


def test_eight_mebibytes_of_tokens_to_decode_take_little_beside_them() -> None:
    body = full_body(b"tokens", b"1")
    tracemalloc.start()
    parse(DetokenizeBody, body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MAX_PEAK_BYTES


IDS = st.lists(st.integers(0, (1 << 31) - 1), max_size=30)


@given(st.lists(IDS, min_size=1, max_size=5), st.sampled_from([None, 0, 3]), st.integers(1, 40))
def test_ids_are_those_of_the_json(prompts: list[list[int]], indent: int | None, at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("server.api.schemas.PARSED_BYTES", at_once)
        for prompt, expected in ((prompts, prompts), (prompts[0], prompts[:1])):
            if not prompt:
                continue
            json = msgspec.json.encode({"model": "base", "prompt": prompt})
            if indent is not None:
                json = msgspec.json.format(json, indent=indent)
            assert list(map(list, parse(CompletionBody, bytearray(json)).prompts())) == expected


@pytest.mark.parametrize(
    "prompt",
    [
        b"[]", b"[1, -1]", b"[1.5]", b"[1e2]", b"[true]", b"[null]", b"[{}]", b"[2147483648]", b'[1, "a"]',
        b'["a", 1]', b"[[1], 2]", b"[1, [2]]", b"[[1], [[2]]]", b'[[1], "a"]', b"[" + b"9" * 400 + b"]", b"5", b"null",
        b"[" + b",".join([b"[1]"] * 1025) + b"]",
    ],
    ids=lambda prompt: prompt[:12].decode(),
)  # fmt: skip
def test_what_is_no_prompt_is_refused_by_its_field(prompt: bytes) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(CompletionBody, bytearray(HEAD % b"prompt" + prompt + b"}"))
    assert refused.value.param == "prompt"


def test_an_empty_list_of_tokens_is_one() -> None:
    for tokens in (b"[]", b"[ ]"):
        assert not parse(DetokenizeBody, bytearray(HEAD % b"tokens" + tokens + b"}")).token_ids()


@pytest.mark.parametrize("last", [[1, 300], [], [1] * 5000], ids=["an id too high", "empty", "too long"])
def test_the_engine_gets_no_prompt_of_a_call_with_one_that_it_would_refuse(
    last: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = make_family(tmp_path / "family", seed=5, num_variants=0)
    monkeypatch.setattr("server.api.generation.MAX_CHECKED_HERE", 0)

    async def talk(app: HttpApp) -> None:
        def refused(*_: object) -> None:
            raise AssertionError("the engine got a request")

        monkeypatch.setattr(app.engine_client, "submit", refused)
        body = {"model": "base", "prompt": [[1, 2]] * 20 + [last], "max_tokens": 1}
        reply = await app.client.post("/v1/completions", json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")

    with_engine(family.base, tmp_path / "registry", talk)


def test_prompts_are_checked_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, loops = make_family(tmp_path / "family", seed=5, num_variants=0), list[bool]()
    check = Request.check

    def noted(request: Request, max_model_len: int) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            loops.append(False)
        else:
            loops.append(True)
        check(request, max_model_len)

    async def talk(app: HttpApp) -> None:
        monkeypatch.setattr(Request, "check", noted)
        for size in (1, 200):
            body = {"model": "base", "prompt": [[1] * size] * 20, "max_tokens": 1}
            reply = await app.client.post("/v1/completions", json=body)
            assert reply.status_code == 200
            monkeypatch.setattr("server.api.generation.MAX_CHECKED_HERE", 1000)

    with_engine(family.base, tmp_path / "registry", talk)
    # Twenty small ones on the loop and in the engine, then twenty large ones beside the loop and in the engine.
    assert (loops.count(True), loops.count(False)) == (20, 60)


def test_the_pages_of_prompts_are_hashed_in_the_http_process_and_large_ones_beside_its_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = make_family(tmp_path / "family", seed=5, num_variants=0)
    threads, requests = list[threading.Thread](), list[Request]()
    hash_pages, submit = PageHashes.of, EngineClient.submit

    def noted(token_ids: TokenIds, page_tokens: int) -> PageHashes:
        threads.append(threading.current_thread())
        return hash_pages(token_ids, page_tokens)

    def recorded(engine: EngineClient, request: Request, on_event: OnEvent) -> None:
        requests.append(request)
        submit(engine, request, on_event)

    monkeypatch.setattr(PageHashes, "of", noted)
    monkeypatch.setattr(EngineClient, "submit", recorded)

    async def talk(app: HttpApp) -> None:
        monkeypatch.setattr("server.api.generation.MAX_CHECKED_HERE", 100)
        for size in (50, 150):
            body = {"model": "base", "prompt": list(range(size)), "max_tokens": 1}
            assert (await app.client.post("/v1/completions", json=body)).status_code == 200
        assert [thread is threading.current_thread() for thread in threads] == [True, False]

    with_engine(family.base, tmp_path / "registry", talk)
    assert [request.page_hashes for request in requests] == [
        hash_pages(token_ids_of(range(size)), PAGE_TOKENS) for size in (50, 150)
    ]


@pytest.mark.parametrize("page_tokens", [None, 5])
def test_an_engine_hashes_what_comes_without_hashes_of_its_own_pages(
    page_tokens: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = make_family(tmp_path / "family", seed=5, num_variants=0)

    async def talk(app: HttpApp) -> None:
        facts = replace(app.engine_client.facts, page_tokens=page_tokens)
        body = {"model": "base", "prompt": list(range(3 * PAGE_TOKENS)), "max_tokens": 4, "temperature": 0}
        first = await app.client.post("/v1/completions", json=body)
        monkeypatch.setattr(EngineClient, "facts", facts)
        second = await app.client.post("/v1/completions", json=body)
        assert first.json()["choices"] == second.json()["choices"]
        hits = f"peraxis_prefix_cache_hits_total {2.0 * PAGE_TOKENS}"
        assert hits in (await app.client.get("/metrics")).text

    with_engine(family.base, tmp_path / "registry", talk)


@pytest.mark.parametrize("more", [-1, 1, 32])
def test_a_request_with_another_number_of_hashes_than_its_pages_is_refused(more: int) -> None:
    ids = token_ids_of(range(40))
    hashes = PageHashes.of(ids, 16)
    assert len(hashes.chain) == 2 * HASH_BYTES
    request = Request("a", "default", None, None, ids, 100, page_hashes=hashes)
    request.check(100)
    wrong = PageHashes(16, (hashes.chain + bytes(32))[: len(hashes.chain) + more])
    with pytest.raises(InvalidRequest, match="no hashes of the pages of 40 tokens"):
        replace_fields(request, page_hashes=wrong).check(100)


def test_an_id_of_a_request_is_below_its_vocabulary_s_size() -> None:
    def request(*ids: int) -> Request:
        return Request("a", "default", None, None, token_ids_of(ids), 10)

    request(0, 9).check(100)
    for ids in ((10,), (-1,), (0, 10, 0)):
        with pytest.raises(InvalidRequest, match="from 0 to 9"):
            request(*ids).check(100)
