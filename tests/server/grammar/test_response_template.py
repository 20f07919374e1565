"""Answers of variants with response templates of transformers, also hostile ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from server.errors import InvalidRequest
from server.grammar.answer_parser import Parts, ToolCall
from server.grammar.response_template import (
    ParsedAnswer,
    TemplateAnswer,
    parse_answers,
    parsed_by_template,
)
from server.text.service import TextService
from server.text.tokenizer import LoadedTokenizer
from server.workers import pool as variant_work
from server.workers.pool import WorkerPool
from tests.helpers.tiny_models import CHAT_TEMPLATE, make_tokenizer
from tests.server.helpers.answer_templates import TOOLS as TOOLS_OF_ANSWERS
from tests.server.helpers.answer_templates import call, form_of, messages, parsed, written
from tests.server.helpers.texts import RESPONSE_TEMPLATE, Texts, files_of, make_texts

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
    texts: Texts, template: dict[str, Any], answer: str, directory: Path, num_new: int = 1
) -> list[ParsedAnswer]:
    """Return the parsed beginnings of an answer of a variant with a response template, the whole one last.

    Args:
        num_new: characters from each beginning to the next.
    """
    files = files_of(make_tokenizer(1, CHAT_TEMPLATE), directory)
    config = {**json.loads(files["tokenizer_config.json"]), "response_template": template}
    record = texts.publish({**files, "tokenizer_config.json": json.dumps(config).encode()})
    found: list[ParsedAnswer] = []

    async def test(service: TextService, pool: WorkerPool) -> None:
        text = await service.of(record, "default")
        for size in range(0, len(answer) + num_new, num_new):
            beginning, is_whole = answer[:size], size >= len(answer)
            one = TemplateAnswer("", beginning, beginning, is_whole, is_single=False)
            found.extend(await parsed_by_template(text, [one], json.dumps(TOOLS).encode()))

    texts.run(test)
    return found


def test_a_response_template_tells_thoughts_content_and_calls_apart(texts: Texts, tmp_path: Path) -> None:
    answer = '<think>Add.</think>Here: <call>{"name": "add", "arguments": {"a": 1}}</call>'
    found = parse(texts, RESPONSE_TEMPLATE, answer, tmp_path)
    assert found[-1] == ParsedAnswer("Here:", "Add.", (ToolCall("add", '{"a": 1}'),))


def test_the_beginning_of_an_answer_has_parts_of_the_whole(texts: Texts, tmp_path: Path) -> None:
    answer = '<think>Add.</think>Here: <call>{"name": "add", "arguments": {"a": 1}}</call> There.'
    *beginnings, whole = parse(texts, RESPONSE_TEMPLATE, answer, tmp_path)
    assert whole.content == "Here:  There."
    for beginning in beginnings:
        assert whole.content.startswith(beginning.content)
        assert whole.reasoning.startswith(beginning.reasoning)
        assert whole.calls[: len(beginning.calls)] == beginning.calls
    assert beginnings[len("<think>Add")].reasoning == "Add"


IN_TAGS = {
    **RESPONSE_TEMPLATE,
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {},
    },
}  # fmt: skip
AS_FIELDS = {
    **RESPONSE_TEMPLATE,
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>", "repeats": True, "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "template"), [("json", IN_TAGS), ("fields", AS_FIELDS)])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_whole_answers_have_the_parts_that_transformers_finds(
    name: str, template: dict[str, Any], data: st.DataObject
) -> None:
    answer = written(name, data.draw(messages(name)))
    # transformers takes the first end of a region that it sees, and keeps the last region of content.
    assume("</tool_call>" not in answer or not answer.rpartition("</tool_call>")[2].strip())
    theirs = parse_response(answer, template, prefix="", tools=list(TOOLS_OF_ANSWERS))
    calls = [
        (each["function"]["name"], each["function"]["arguments"]) for each in theirs.get("tool_calls", ())
    ]
    own = parsed(form_of(name), [answer])
    tokenizer = LoadedTokenizer(make_tokenizer())
    tokenizer.fast.response_template = template
    whole = TemplateAnswer("", answer, answer, is_whole=True, is_single=False)
    (by_template,) = parse_answers(tokenizer, [whole], json.dumps(TOOLS_OF_ANSWERS).encode())
    for content, reasoning, found in (
        (own.content, own.reasoning, [(each.name, each.arguments) for each in own.calls]),
        (
            by_template.content,
            by_template.reasoning,
            [(each.name, each.arguments) for each in by_template.calls],
        ),
    ):
        assert [(called, json.loads(arguments)) for called, arguments in found] == calls
        assert reasoning == theirs.get("reasoning_content", "")
        assert content.strip() == theirs.get("content", "")


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_what_is_cut_or_invalid_is_content_once_and_a_stream_has_the_parts_of_the_whole(
    data: st.DataObject,
) -> None:
    tokenizer = LoadedTokenizer(make_tokenizer())
    tokenizer.fast.response_template = IN_TAGS
    answer = written("json", data.draw(messages("json"))) + data.draw(
        st.sampled_from(["", "<tool_call>{x</tool_call>"])
    )
    cut = data.draw(st.integers(0, len(answer)))
    beginnings = [
        TemplateAnswer("", answer[:size], answer[:size], is_whole, is_single=False)
        for size in range(cut + 1)
        for is_whole in ((False, True) if size == cut else (False,))
    ]
    *parts, whole = parse_answers(tokenizer, beginnings, b"")
    for part in parts:
        assert whole.content.startswith(part.content)
        assert whole.reasoning.startswith(part.reasoning)
        assert whole.calls[: len(part.calls)] == part.calls


CITING = {**RESPONSE_TEMPLATE, "fields": {**RESPONSE_TEMPLATE["fields"], "cite": {
    "open": "<cite>", "close": "</cite>", "content": "json",
}}}  # fmt: skip
NUMBERS = {**RESPONSE_TEMPLATE, "fields": {"content": {"content": "int"}, "thinking": {
    "open": "<think>", "close": "</think>", "content": "json",
}}}  # fmt: skip


def parsed_by(
    template: dict[str, Any], answer: str, prefix: str = "", is_whole: bool = True, is_cut: bool = False
) -> ParsedAnswer:
    """Return the parts of an answer, or of its beginning."""
    tokenizer = LoadedTokenizer(make_tokenizer())
    tokenizer.fast.response_template = template
    one = TemplateAnswer(prefix, answer, answer, is_whole, is_single=False, is_cut=is_cut)
    return parse_answers(tokenizer, [one], b"")[0]


@pytest.mark.parametrize(
    ("template", "answer", "expected"),
    [
        (CITING, "Hello <cite>{bad</cite> there", ParsedAnswer("Hello <cite>{bad</cite> there")),
        (CITING, "<think>t</think>Hello <cite>{bad", ParsedAnswer("Hello <cite>{bad", "t")),
        (CITING, 'Hello <cite>{"a": 1}</cite> there', ParsedAnswer("Hello  there")),
        (NUMBERS, "<think>{bad</think>no number", ParsedAnswer("no number", "{bad")),
    ],
    ids=["other field", "thoughts before it", "valid", "shown as it comes"],
)
def test_a_region_that_cannot_be_read_is_content_once_and_other_parts_stay(
    template: dict[str, Any], answer: str, expected: ParsedAnswer
) -> None:
    assert parsed_by(template, answer) == expected
    for size in range(len(answer) + 1):
        part = parsed_by(template, answer[:size], is_whole=False)
        assert expected.content.startswith(part.content)
        assert expected.reasoning.startswith(part.reasoning)


INLINE = {
    **RESPONSE_TEMPLATE,
    "fields": {
        "tool_calls": {
            "open_pattern": "<function=(?P<name>[a-z]+)>", "close_pattern": "</function>|$",
            "repeats": True, "content": "xml-inline",
            "content_args": {"tag_pattern": "<parameter=(?P<key>[a-z]+)>(?P<value>.*?)</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    },
}  # fmt: skip
WITHOUT_CLOSING = {**RESPONSE_TEMPLATE, "fields": {"content": {}, "tool_calls": {
    "open": "[CALL]", "content": "json", "transform": {"function": "{content}"},
}}}  # fmt: skip
CUT = "<function=f><parameter=a>1</parameter><parameter=b>rm -rf /tmp/x"
JSON_CALL = '[CALL]{"name": "f", "arguments": {"a": "1"}}'


@pytest.mark.parametrize(
    ("template", "answer"),
    [(INLINE, CUT), (WITHOUT_CLOSING, JSON_CALL), (AS_FIELDS, "<tool_call><function=f></function>")],
)
def test_a_call_that_is_cut_off_is_content(template: dict[str, Any], answer: str) -> None:
    assert parsed_by(template, f"Hi {answer}", is_cut=True) == ParsedAnswer(f"Hi {answer}")


@pytest.mark.parametrize(
    ("template", "answer", "is_cut"),
    [
        (INLINE, CUT, False),
        (INLINE, CUT + "</function>", True),
        (INLINE, CUT + "</function> more", True),
        (WITHOUT_CLOSING, JSON_CALL, False),
    ],
)
def test_a_call_that_has_its_closing_or_ends_with_its_answer_is_a_call(
    template: dict[str, Any], answer: str, is_cut: bool
) -> None:
    assert parsed_by(template, f"Hi {answer}", is_cut=is_cut).calls == (ToolCall("f", '{"a": "1"}'),)


@pytest.mark.parametrize("arguments", ['{"a": NaN}', '{"a": 1e999}', '"no json"', "[1]", "null", '"[1]"'])
def test_a_call_whose_arguments_are_no_json_object_is_content(arguments: str) -> None:
    answer = f'<call>{{"name": "add", "arguments": {arguments}}}</call>'
    assert parsed_by(RESPONSE_TEMPLATE, answer) == ParsedAnswer(answer)


def test_arguments_may_stand_in_a_string() -> None:
    answer = '<call>{"name": "add", "arguments": "{\\"a\\": 1}"}</call>'
    assert parsed_by(RESPONSE_TEMPLATE, answer).calls == (ToolCall("add", '{"a": 1}'),)


@pytest.mark.parametrize(
    ("prefix", "answer", "expected"),
    [
        ("<call>", "{bad</call> x", ParsedAnswer("{bad</call> x")),
        ("<ca", "ll>{bad</call> x", ParsedAnswer("ll>{bad</call> x")),
        ("<ca", "t>", ParsedAnswer("t>")),
        ("<call>", '{"name": "f", "arguments": {}}</call>', ParsedAnswer(calls=(ToolCall("f", "{}"),))),
        ("<think>So", " it is</think>Hi", ParsedAnswer("Hi", "it is")),
    ],
)
def test_text_of_the_prompt_is_in_no_part(prefix: str, answer: str, expected: ParsedAnswer) -> None:
    assert parsed_by(RESPONSE_TEMPLATE, answer, prefix=f"<assistant>{prefix}") == expected


JOINED = {**RESPONSE_TEMPLATE, "fields": {
    "content": {"join": "\n", "repeats": True},
    "thinking": {"open": "<think>", "close": "</think>", "join": ", ", "repeats": True},
    "tool_calls": RESPONSE_TEMPLATE["fields"]["tool_calls"],
}}  # fmt: skip


@pytest.mark.parametrize(
    "answer", ["a <think> one </think> b<think>two</think>", "a", "a<think>b</think><think>c"]
)
def test_regions_are_joined_as_transformers_joins_them(answer: str) -> None:
    theirs = parse_response(answer, JOINED, prefix="")
    whole = parsed_by(JOINED, answer)
    assert (whole.content, whole.reasoning) == (theirs["content"], theirs.get("thinking", ""))
    for size in range(len(answer) + 1):
        part = parsed_by(JOINED, answer[:size], is_whole=False)
        assert whole.content.startswith(part.content)
        assert whole.reasoning.startswith(part.reasoning)


def test_what_cannot_be_read_stays_within_its_region() -> None:
    answer = "a <call>no</call> b"
    assert parsed_by(JOINED, answer) == ParsedAnswer(answer)


def test_regions_without_join_follow_each_other() -> None:
    found = parsed_by(RESPONSE_TEMPLATE, "a<think>x</think>b<think>y</think>c")
    assert found == ParsedAnswer("abc", "xy")


def test_parts_that_were_shown_stay_when_a_later_parse_has_others() -> None:
    shown = ParsedAnswer("Hello", "So", (ToolCall("add", "{}"),))
    other = ParsedAnswer("Other", "So it is")
    assert other.over(shown) == ParsedAnswer("Hello", "So it is", shown.calls)
    assert other.over(shown).behind(shown) == Parts("", " it is")


def test_thoughts_of_a_second_field_do_not_replace_those_that_were_shown() -> None:
    fields = {**RESPONSE_TEMPLATE["fields"], "reasoning_content": {"open": "<why>", "close": "</why>"}}
    found = parsed_by({**RESPONSE_TEMPLATE, "fields": fields}, "<think>So</think>Hi<why>Because</why>")
    assert found == ParsedAnswer("Hi", "So")


def test_with_one_call_at_most_the_parts_behind_it_are_left_out() -> None:
    tokenizer = LoadedTokenizer(make_tokenizer())
    tokenizer.fast.response_template = IN_TAGS
    answer = written("json", {"content": "Hi", "tool_calls": [call("now", {}), call("add", {})]}) + " more"
    (found,) = parse_answers(tokenizer, [TemplateAnswer("", answer, answer, True, is_single=True)], b"")
    assert found == ParsedAnswer("Hi", "", (ToolCall("now", "{}"),))


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        (RESPONSE_TEMPLATE, "<call>no JSON</call>"),
        (RESPONSE_TEMPLATE, '<call>{"name": "add", "argum'),
        ({"fields": "none"}, "hello"),
        (RESPONSE_TEMPLATE, '<call>{"name": "add"}</call>'),
    ],
    ids=["no JSON", "cut", "no template", "no arguments"],
)
def test_an_answer_that_does_not_fit_its_template_is_content(
    template: dict[str, Any], answer: str, texts: Texts, tmp_path: Path
) -> None:
    assert parse(texts, template, answer, tmp_path)[-1] == ParsedAnswer(answer)


def test_a_response_template_that_backtracks_without_end_fails_its_own_request(
    texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variant_work, "WORK_S", 1.0)
    monkeypatch.setattr(variant_work, "LOAD_S", 5.0)
    with pytest.raises(InvalidRequest, match="its tokenizer or chat template failed"):
        parse(texts, BACKTRACKING, "x" * 60, tmp_path, num_new=60)
