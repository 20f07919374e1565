"""Answers of variants with response templates of transformers, also hostile ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from server.errors import InvalidRequest
from server.grammar.tool_calls import DecodedAnswer, FreeAnswer, ParsedAnswer, ToolCall, parsed
from server.text.service import TextService
from server.workers import pool as variant_work
from server.workers.pool import WorkerPool
from tests.helpers.tiny_models import CHAT_TEMPLATE, make_tokenizer
from tests.server.helpers.texts import RESPONSE_TEMPLATE, Texts, files_of, make_texts

MAX_TOKENS = 512
PROMPT = "<user>hi\n<assistant>"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
BACKTRACKING = {**RESPONSE_TEMPLATE, "fields": {"content": {"close_pattern": "(x|xx)+[yz]"}}}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return make_texts(tmp_path_factory.mktemp("texts"))


def parse(
    texts: Texts, template: dict[str, Any] | None, answer: str, directory: Path, num_new: int = 1
) -> list[ParsedAnswer]:
    """Return the parsed beginnings of an answer of a variant with a response template, the whole one last.

    Args:
        num_new: tokens from each beginning to the next.
    """
    files = files_of(make_tokenizer(1, CHAT_TEMPLATE), directory)
    config = {**json.loads(files["tokenizer_config.json"]), "response_template": template}
    record = texts.publish({**files, "tokenizer_config.json": json.dumps(config).encode()})
    found: list[ParsedAnswer] = []

    async def test(service: TextService, pool: WorkerPool) -> None:
        text = await service.of(record, "default")
        prompt, ids = [tuple(await text.encode(part, MAX_TOKENS)) for part in (PROMPT, answer)]
        before: tuple[int, ...] | DecodedAnswer = prompt
        for size in range(0, len(ids) + num_new, num_new):
            one = FreeAnswer(before, ids[max(0, size - num_new) : size], answer, size >= len(ids))
            if (answers := await parsed(text, [one], json.dumps(TOOLS).encode())) is None:
                return
            ((each, before),) = answers
            found.append(each)

    texts.run(test)
    return found


def test_a_response_template_tells_thoughts_content_and_calls_apart(texts: Texts, tmp_path: Path) -> None:
    answer = '<think>Add.</think>Here: <call>{"name": "add", "arguments": {"a": 1}}</call>'
    found = parse(texts, RESPONSE_TEMPLATE, answer, tmp_path)
    assert found[-1] == ParsedAnswer("Here:", (ToolCall("add", '{"a": 1}'),), "Add.")


def test_the_beginning_of_an_answer_has_parts_of_the_whole(texts: Texts, tmp_path: Path) -> None:
    answer = '<think>Add.</think>Here: <call>{"name": "add", "arguments": {"a": 1}}</call> There.'
    *beginnings, whole = parse(texts, RESPONSE_TEMPLATE, answer, tmp_path)
    assert whole.content == "Here:  There."
    for beginning in beginnings:
        assert whole.content.startswith(beginning.content)
        assert whole.reasoning.startswith(beginning.reasoning)
        assert whole.calls[: len(beginning.calls)] == beginning.calls
    assert beginnings[len("<think>Add")].reasoning == "Add"


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        (RESPONSE_TEMPLATE, "<call>no JSON</call>"),
        ({"fields": "none"}, "hello"),
        (RESPONSE_TEMPLATE, '<call>{"name": "add"}</call>'),
    ],
    ids=["no JSON", "no template", "no arguments"],
)
def test_an_answer_that_does_not_fit_its_template_is_content(
    template: dict[str, Any], answer: str, texts: Texts, tmp_path: Path
) -> None:
    assert parse(texts, template, answer, tmp_path)[-1] == ParsedAnswer(answer)


def test_a_variant_without_a_response_template_says_so(texts: Texts, tmp_path: Path) -> None:
    assert parse(texts, None, "hello", tmp_path) == []


def test_a_response_template_that_backtracks_without_end_fails_its_own_request(
    texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variant_work, "WORK_S", 1.0)
    monkeypatch.setattr(variant_work, "LOAD_S", 5.0)
    with pytest.raises(InvalidRequest, match="its tokenizer or chat template failed"):
        parse(texts, BACKTRACKING, "x" * 60, tmp_path, num_new=60)
