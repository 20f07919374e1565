"""Hostile tokenizers, templates and prompts at requests: each fails its own requests and no other variant's."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path

import pytest

from deltastore.errors import ArtifactError
from server.errors import InvalidRequest
from server.protocol.request import SamplingParams
from server.text import service as service_module
from server.text import tokenizer as loaded_tokenizer
from server.text.chat_template import Conversation
from server.text.detokenizer import IncrementalDetokenizer
from server.text.service import TextService
from server.workers import pool as variant_work
from server.workers.pool import WorkerPool
from server.workers.worker_main import Limits
from tests.helpers.tiny_models import CHAT_TEMPLATE, make_tokenizer
from tests.server.helpers.texts import Texts, changed, files_of, make_texts, replace, sequence
from tests.server.helpers.worker_tasks import probe_when

MAX_TOKENS = 512
CONVERSATION = Conversation([{"role": "user", "content": "hi"}])
SLOW_TEMPLATE = b"{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
MILLION = sequence("normalizers", replace("a", "a" * 10**6), replace("a", "a" * 10**6))
BACKTRACKING = sequence(
    "decoders",
    replace("e", "x" * 20_000),
    {"type": "Replace", "pattern": {"Regex": r"x*(?!x)\D\d"}, "content": ""},
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return make_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def own_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return files_of(make_tokenizer(2, CHAT_TEMPLATE), tmp_path_factory.mktemp("own"))


def wait_for_memory_alone(patch: pytest.MonkeyPatch) -> None:
    """Take away the limits of time, which a slow machine reaches first."""
    for kind in ("WORK", "LOAD"):
        memory_bytes = getattr(variant_work, f"{kind}_LIMITS").memory_bytes
        patch.setattr(variant_work, f"{kind}_S", 600.0)
        patch.setattr(variant_work, f"{kind}_LIMITS", Limits(memory_bytes, cpu_s=600.0))


async def assert_others_are_served(service: TextService) -> None:
    base = await service.of(None, "another")
    assert await base.decode(await base.encode("abc", MAX_TOKENS)) == "abc"
    assert (
        await base.decode((await base.render_chat(CONVERSATION, MAX_TOKENS)).ids) == "<user>hi\n<assistant>"
    )


def test_a_normalizer_that_makes_a_terabyte_fails_its_own_request(
    texts: Texts, own_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_memory_alone(monkeypatch)
    record = texts.publish(changed(own_files, normalizer=MILLION))

    async def test(service: TextService, pool: WorkerPool) -> None:
        with pytest.raises(InvalidRequest, match="of memory, or crashed"):
            # The first use of the tokenizer encodes a probe that contains the letter.
            await service.of(record, "default")
        await assert_others_are_served(service)

    texts.run(test)


def test_a_decoder_that_backtracks_without_end_fails_its_own_request(
    texts: Texts, own_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = texts.publish(changed(own_files, decoder=BACKTRACKING))
    # Of processor time, of which others need far less on any machine.
    for kind in ("WORK", "LOAD"):
        memory_bytes = getattr(variant_work, f"{kind}_LIMITS").memory_bytes
        monkeypatch.setattr(variant_work, f"{kind}_S", 600.0)
        monkeypatch.setattr(variant_work, f"{kind}_LIMITS", Limits(memory_bytes, cpu_s=2.0))

    async def test(service: TextService, pool: WorkerPool) -> None:
        async def ask() -> None:
            text = await service.of(record, "default")
            ids = await text.encode("eeeeeeee", MAX_TOKENS)
            await text.decode_streams([IncrementalDetokenizer(SamplingParams()).push(ids)])

        asking = asyncio.create_task(ask())
        await assert_others_are_served(service)
        with pytest.raises((InvalidRequest, ArtifactError)):
            await asking

    texts.run(test)


def test_45_requests_to_a_slow_template_delay_no_other_tenant(
    texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_memory_alone(monkeypatch)
    record = texts.publish({"chat_template.jinja": SLOW_TEMPLATE})

    async def test(service: TextService, pool: WorkerPool) -> None:
        slow = await service.of(record, "default")
        requests = [asyncio.create_task(slow.render_chat(CONVERSATION, MAX_TOKENS)) for _ in range(45)]
        await assert_others_are_served(service)
        assert not any(request.done() for request in requests)
        # Their clients leave.
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        await assert_others_are_served(service)

    texts.run(test)


def test_16000_added_tokens_delay_no_other_tenant(
    texts: Texts, own_files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_memory_alone(monkeypatch)
    monkeypatch.setattr(service_module, "probe", partial(probe_when, tmp_path / "go"))
    rules = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": 259 + number, "content": f"<extra-{number}>", **rules} for number in range(16_000)]
    record = texts.publish(changed(own_files, added_tokens=added))

    async def test(service: TextService, pool: WorkerPool) -> None:
        loading = asyncio.create_task(service.of(record, "default"))
        await assert_others_are_served(service)
        assert not loading.done()
        (tmp_path / "go").touch()
        assert await (await loading).encode("<extra-15999>", MAX_TOKENS) == [16_258]

    texts.run(test)


def test_work_that_was_killed_is_refused_for_a_while(texts: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    record = texts.publish({"chat_template.jinja": SLOW_TEMPLATE + b"{# again #}"})
    monkeypatch.setattr(variant_work, "MIN_PAUSE_S", 1000.0)
    monkeypatch.setattr(variant_work, "MAX_PAUSE_S", 1000.0)

    async def test(service: TextService, pool: WorkerPool) -> None:
        slow = await service.of(record, "default")
        with monkeypatch.context() as patch:
            patch.setattr(variant_work, "WORK_S", 0.5)
            with pytest.raises(
                InvalidRequest, match=r"a@\d+: its tokenizer or chat template failed: the work was not"
            ):
                await slow.render_chat(CONVERSATION, MAX_TOKENS)
        with pytest.raises(InvalidRequest, match=r"try again in (1000|\d{3}) s"):
            await (await service.of(record, "default")).render_chat(CONVERSATION, MAX_TOKENS)
        await assert_others_are_served(service)

    texts.run(test)


def test_a_template_that_needs_too_much_memory_says_so(texts: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_memory_alone(monkeypatch)
    record = texts.publish({"chat_template.jinja": b"{{ 'x' * 4000000000 }}"})

    async def test(service: TextService, pool: WorkerPool) -> None:
        text = await service.of(record, "default")
        with pytest.raises(InvalidRequest, match="needed more than 1024 MiB of memory"):
            await text.render_chat(CONVERSATION, MAX_TOKENS)

    texts.run(test)


@pytest.mark.parametrize("own", [False, True])
def test_a_prompt_of_8_mb_is_refused_before_it_is_tokenized(
    own: bool, texts: Texts, own_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = texts.publish(own_files) if own else None
    sizes: list[int] = []
    real = loaded_tokenizer.LoadedTokenizer._ids

    def measured(self: loaded_tokenizer.LoadedTokenizer, text: str, special: bool, param: str) -> list[int]:
        sizes.append(len(text))
        return real(self, text, special, param)

    monkeypatch.setattr(loaded_tokenizer.LoadedTokenizer, "_ids", measured)

    async def test(service: TextService, pool: WorkerPool) -> None:
        text = await service.of(record, "default")
        with pytest.raises(
            InvalidRequest, match=r"8000000 characters, which are more than 512 tokens"
        ) as refused:
            await text.encode("word " * 1_600_000, MAX_TOKENS)
        assert refused.value.param == "prompt"

    texts.run(test)
    assert not sizes


def test_a_prompt_that_only_seems_long_is_encoded(texts: Texts, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["." * 100])
    record = texts.publish(files_of(tokenizer, tmp_path))

    async def test(service: TextService, pool: WorkerPool) -> None:
        text = await service.of(record, "default")
        assert await text.encode("." * 51_200, MAX_TOKENS) == [259] * 512
        with pytest.raises(InvalidRequest, match="513 tokens, more than the 512"):
            await text.encode("." * 51_000 + "aaa", MAX_TOKENS)
        # Its beginning of 4096 characters has enough tokens to refuse it.
        with pytest.raises(InvalidRequest, match="25000 characters, which are more than 512 tokens"):
            await text.encode("word " * 5000, MAX_TOKENS)

    texts.run(test)


def test_a_long_prompt_of_one_tenant_does_not_delay_another_s(texts: Texts) -> None:
    async def test(service: TextService, pool: WorkerPool) -> None:
        slow, other = await service.of(None, "slow"), await service.of(None, "other")
        long = [asyncio.create_task(slow.encode("word " * 100_000, 10**6)) for _ in range(8)]
        await asyncio.sleep(0)
        assert len(await other.encode("abc " * 1000, 10**6)) == 4000
        assert not long[-1].done()
        for request in long:
            request.cancel()
        await asyncio.gather(*long, return_exceptions=True)

    texts.run(test)


@pytest.mark.parametrize("prompt", ["\ud800", "a\udfff"])
def test_a_prompt_that_is_no_unicode_is_one_bad_request(prompt: str, texts: Texts) -> None:
    async def test(service: TextService, pool: WorkerPool) -> None:
        text = await service.of(None, "default")
        with pytest.raises(InvalidRequest, match="cannot encode the prompt"):
            await text.encode(prompt, MAX_TOKENS)

    texts.run(test)


def test_a_template_that_makes_no_unicode_is_one_bad_request(texts: Texts) -> None:
    record = texts.publish({"chat_template.jinja": b"{{ '\\ud800' }}"})

    async def test(service: TextService, pool: WorkerPool) -> None:
        text = await service.of(record, "default")
        with pytest.raises(InvalidRequest, match="no Unicode"):
            await text.render_chat(CONVERSATION, MAX_TOKENS)

    texts.run(test)


def test_a_generation_config_of_63_mb_is_refused_unread(texts: Texts) -> None:
    content = json.dumps({"eos_token_id": 257, "notes": "x" * (63 << 20)}).encode()
    record = texts.publish({"generation_config.json": content})

    async def test(service: TextService, pool: WorkerPool) -> None:
        with pytest.raises(ArtifactError, match=r"its generation_config.json has 660\d+ bytes"):
            await service.of(record, "default")

    texts.run(test)


def test_a_damaged_tokenizer_that_an_older_server_published_is_one_clear_error(
    texts: Texts, own_files: dict[str, bytes]
) -> None:
    record = texts.publish({**own_files, "tokenizer.json": b'{"version": "1.0"}'})

    async def test(service: TextService, pool: WorkerPool) -> None:
        for _ in range(2):
            with pytest.raises(
                ArtifactError, match=r"default/a@\d+: its tokenizer cannot be loaded"
            ) as error:
                await service.of(record, "default")
            assert "/" not in str(error.value).removeprefix("default/")

    texts.run(test)


def test_closing_ends_hostile_work_at_once(texts: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_memory_alone(monkeypatch)
    record = texts.publish({"chat_template.jinja": SLOW_TEMPLATE + b"{# last #}"})

    async def test(service: TextService, pool: WorkerPool) -> None:
        slow = await service.of(record, "default")
        requests = [asyncio.create_task(slow.render_chat(CONVERSATION, MAX_TOKENS)) for _ in range(5)]
        await assert_others_are_served(service)
        await pool.close()
        results = await asyncio.gather(*requests, return_exceptions=True)
        assert {type(result).__name__ for result in results} == {"Draining"}

    texts.run(test)
