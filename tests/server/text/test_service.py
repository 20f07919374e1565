"""The text service: which tokenizer serves a variant, what it costs others, and hostile files at the first request."""

from __future__ import annotations

import json

import pytest

from server.text.decoding.incremental_detokenizer import IncrementalDetokenizer
from server.text.service import TextService
from server.workers.pool import WorkerPool
from tests.helpers.tiny_models import CHAT_TEMPLATE, make_tokenizer
from tests.server.helpers.texts import ROWS, Texts, files_of, make_texts

MAX_TOKENS = 512
MESSAGES = [{"role": "user", "content": "hi"}]
SLOW_TEMPLATE = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return make_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def own_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a tokenizer with two tokens more than the base's."""
    return files_of(make_tokenizer(2, CHAT_TEMPLATE), tmp_path_factory.mktemp("own"))


def test_a_variant_without_files_has_the_base_s_text(texts: Texts) -> None:
    record = texts.publish({})

    async def test(service: TextService, pool: WorkerPool) -> None:
        text, base = await service.of(record, "default"), await service.of(None, "default")
        assert await text.encode("abc", MAX_TOKENS) == await base.encode("abc", MAX_TOKENS)
        assert text.num_embeddings == ROWS != base.num_embeddings == 300
        assert text.eos_token_ids == base.eos_token_ids == {257}
        ids = await text.render_chat(MESSAGES, MAX_TOKENS)
        assert await text.decode(ids) == "<user>hi\n<assistant>"

    texts.run(test)


def test_a_variant_brings_its_tokens_template_and_defaults(texts: Texts, own_files: dict[str, bytes]) -> None:
    generation = {"eos_token_id": 260, "do_sample": True, "top_k": 5}
    template = b"{{ messages[0].content }}!"
    generation_file = json.dumps(generation).encode()
    record = texts.publish(
        {**own_files, "chat_template.jinja": template, "generation_config.json": generation_file}
    )

    async def test(service: TextService, pool: WorkerPool) -> None:
        text = await service.of(record, "default")
        assert await text.encode("<added-1>", MAX_TOKENS) == [260]
        ids = await text.render_chat(MESSAGES, MAX_TOKENS)
        assert await text.decode(ids) == "hi!"
        assert await text.decode_each(ids) == ["h", "i", "!"]
        assert text.eos_token_ids == {260}
        assert text.generation_defaults == {"top_k": 5}
        detokenizer = IncrementalDetokenizer(())
        [new] = await text.decode_streams([detokenizer.push(ids, is_last=True)])
        assert detokenizer.take(new).texts == ("h", "i", "!")

    texts.run(test)


def test_a_variant_that_changes_only_the_template_has_the_base_s_tokenizer(
    texts: Texts, own_files: dict[str, bytes]
) -> None:
    record = texts.publish({"chat_template.jinja": b"{{ bos_token }}[{{ messages[0].content }}]"})

    async def test(service: TextService, pool: WorkerPool) -> None:
        text = await service.of(record, "default")
        assert await text.decode(await text.render_chat(MESSAGES, MAX_TOKENS)) == "[hi]"

    texts.run(test)
