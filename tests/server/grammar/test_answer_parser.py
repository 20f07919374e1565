"""Answers of every form, split into their parts: as they come, whole, and cut anywhere."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replace_struct

from server.grammar.answer_parser import AnswerParser, CallDelta, Parts
from server.grammar.field_values import ArgumentTypes, typed
from server.grammar.grammar import Requested
from server.text.answer_form import AnswerForm
from tests.server.helpers.answer_templates import (
    REQUESTED,
    TEMPLATES,
    TOOLS_JSON,
    WITHOUT_CONTENT,
    call,
    form_of,
    messages,
    parsed,
    written,
)
from tests.server.helpers.lines import lines_of

NAMES = sorted(TEMPLATES)
FORMS = {name: form_of(name) for name in NAMES}
PLAIN = AnswerForm()


def told(parts: Parts) -> list[tuple[str | None, Any]]:
    """Return the calls with their arguments as values."""
    return [(delta.name, json.loads(delta.arguments)) for delta in parts.calls]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_an_answer_as_the_template_writes_it_is_read_back(name: str, data: st.DataObject) -> None:
    message = data.draw(messages(name))
    found = parsed(FORMS[name], [written(name, message)])
    calls = [
        (each["function"]["name"], each["function"]["arguments"]) for each in message.get("tool_calls", ())
    ]
    assert told(found) == calls
    assert found.reasoning == message.get("reasoning_content", "").strip()
    # Templates without both leave the content out.
    if not (calls and name in WITHOUT_CONTENT):
        assert found.content.strip() == message["content"].strip()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_stream_has_the_parts_of_the_whole_wherever_the_answer_ends(name: str, data: st.DataObject) -> None:
    answer = written(name, data.draw(messages(name)))
    whole = parsed(FORMS[name], [answer])
    for cut in range(len(answer) + 1):
        in_one = parsed(FORMS[name], [answer[:cut]])
        assert parsed(FORMS[name], list(answer[:cut])) == in_one
        assert in_one.calls == whole.calls[: len(in_one.calls)]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_stream_of_any_markup_has_the_parts_of_the_whole(name: str, data: st.DataObject) -> None:
    markup = [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<function=",
        "<parameter=",
        "</function>",
    ]
    markup += ["</parameter>", "[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>", "<|end|>", "<|start|>"]
    markup += [
        '{"name": "now", "arguments": {}}',
        '{"a": "}',
        "{",
        "}",
        "[",
        "]",
        "now",
        ">",
        "\n",
        " ",
        "x",
        ",",
    ]
    markup += ["analysis", "to=functions.now", "final", "<arg_key>", "</arg_key>", "<|python_tag|>", ";"]
    words = data.draw(st.lists(st.sampled_from(markup), max_size=14))
    answer = "".join(words)
    in_one = parsed(FORMS[name], [answer])
    assert parsed(FORMS[name], list(answer)) == in_one
    assert parsed(FORMS[name], words) == in_one


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("json", '<tool_call>{"name": "now", "arguments": {}}</tool_call>', '<tool_call>{"name": "now", "arg'),
        ("json", '<tool_call>{"name": "now", "arguments": {}}</tool_call>', "<tool_call>{name: now}</tool_call>"),
        ("fields", "<tool_call><function=now></function></tool_call>", "<tool_call><function=add><parameter=te"),
        ("list", '[TOOL_CALLS][{"name": "now", "arguments": {}}', ',{"name": "add", "argum'),
        ("spaced", '[TOOL_CALLS] [{"name": "now", "arguments": {}}', ',{"name": "add", "argum'),
        ("named", "[TOOL_CALLS]now[ARGS]{}", "[TOOL_CALLS]add[ARGS]{"),
        ("identified", "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}", "[TOOL_CALLS]add[CALL_ID]abcd"),
        ("section", '<calls>\n<invoke name="now">\n</invoke>\n', '<invoke name="add">\n<parameter na'),
        ("named section", "<｜calls｜><｜call｜>now<｜sep｜>{}<｜end｜>", "<｜call｜>add<｜sep｜>{"),
        ("numbered", "<|calls|><|call_begin|>functions.now:0<|argument|>{}<|call_end|>", "<|call_begin|>functions.add"),
        ("bare", '{"name": "now", "parameters": {}};', '{"name": "add", "parameters": 1}'),
    ],
)  # fmt: skip
def test_finished_calls_are_calls_and_an_unfinished_one_is_content(
    name: str, first: str, second: str
) -> None:
    found = parsed(FORMS[name], [first + second])
    assert told(found) == [("now", {})]
    assert found.content == second


@pytest.mark.parametrize(
    ("answer", "content"),
    [
        ("It is sunny.", "It is sunny."),
        ("", ""),
        ("  hi \n", "  hi \n"),
        ("[]", "[]"),
        ('{"name": "unknown", "arguments": {}}', '{"name": "unknown", "arguments": {}}'),
        ('{"name": "add", "arguments": "text"}', '{"name": "add", "arguments": "text"}'),
        ('{"name": ["add"], "arguments": {}}', '{"name": ["add"], "arguments": {}}'),
        ('Calling {"name": "add", "arguments": {}}', 'Calling {"name": "add", "arguments": {}}'),
        ("[" * 100_000, "[" * 100_000),
        ('{"a":' * 10_000 + "1" + "}" * 10_000, '{"a":' * 10_000 + "1" + "}" * 10_000),
        ("\ud800", "\ud800"),
        ('{"\ud800": 1}', '{"\ud800": 1}'),
    ],
)
def test_text_that_is_no_call_is_content(answer: str, content: str) -> None:
    assert parsed(PLAIN, [answer]) == Parts(content)


@pytest.mark.parametrize(
    "answer",
    [
        '{"name": "add", "arguments": {"number": 1}}',
        ' [{"name": "add", "parameters": {"number": 1}}]\n',
        '{"type": "function", "function": {"name": "add", "arguments": "{\\"number\\": 1}"}}',
    ],
)
def test_where_a_template_shows_no_calls_json_of_known_functions_is_a_call(answer: str) -> None:
    found = parsed(PLAIN, [answer])
    assert told(found) == [("add", {"number": 1})]
    assert not found.content.strip()


def test_an_id_that_a_model_leaves_out_does_not_matter() -> None:
    answer = "[TOOL_CALLS]add[ARGS]{}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}"
    assert parsed(FORMS["identified"], list(answer)).content == ""
    assert told(parsed(FORMS["identified"], [answer])) == [("add", {}), ("now", {})]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("fields", "So\n<function=add>\n<parameter=number>\n3\n</parameter>\n</function>\n</tool_call>"),
        ("fields", "So <function=add><parameter=number>3</parameter></function>"),
        ("section", 'So<invoke name="add"><parameter name="number">3</parameter></invoke></calls>'),
    ],
)
def test_the_first_word_before_fields_may_be_left_out(name: str, answer: str) -> None:
    for pieces in ([answer], list(answer)):
        found = parsed(FORMS[name], pieces)
        assert (found.content, told(found)) == ("So", [("add", {"number": 3})])


@pytest.mark.parametrize(
    ("header", "body", "content", "reasoning"),
    [
        ("analysis to=python code", "print(1)", "", "print(1)"),
        ("commentary to=browser.search", '{"q":1}', '{"q":1}', ""),
        ("commentary to=assistant", '{"q":1}', '{"q":1}', ""),
    ],
)
def test_messages_of_harmony_to_others_than_functions_are_no_calls(
    header: str, body: str, content: str, reasoning: str
) -> None:
    answer = f"<|channel|>{header}<|message|>{body}<|call|>"
    assert parsed(FORMS["channels"], list(answer)) == Parts(content, reasoning)


def test_harmonys_calls_may_name_a_known_function_alone() -> None:
    answer = '<|channel|>commentary to=add<|message|>{"number":1}'
    assert told(parsed(FORMS["channels"], [answer])) == [("add", {"number": 1})]


def test_llamas_calls_behind_a_tag_are_json_or_python() -> None:
    form = FORMS["bare"]
    assert told(parsed(form, ['<|python_tag|>{"name": "add", "parameters": {}}'])) == [("add", {})]
    both = '<|python_tag|>{"name": "add", "parameters": {}}; {"name": "now", "parameters": {}}'
    assert told(parsed(form, list(both))) == [("add", {}), ("now", {})]
    python = '<|python_tag|>add.call(text="a \\"b\\"", number = "1")'
    assert told(parsed(form, [python])) == [("add", {"text": 'a "b"', "number": "1"})]
    for other in ("<|python_tag|>print(1)", "<|python_tag|>add.call(text=" + "  " * 40_000, python[:-1]):
        assert parsed(form, [other]) == Parts(other)


@pytest.mark.parametrize("text", ["to=functions.now it is", "<|channel|>", "So<|end|>"])
def test_a_message_of_harmony_that_the_prompt_has_begun_goes_on(text: str) -> None:
    thinking = replace_struct(FORMS["channels"], is_reasoning=True)
    shown = text.removesuffix("<|end|>")
    assert parsed(thinking, list(text)) == Parts("", shown)
    speaking = replace_struct(FORMS["channels"], is_content=True)
    assert parsed(speaking, list(text)) == Parts(shown)


def test_markup_in_arguments_is_text() -> None:
    argument = "</tool_call> <tool_call> {"
    answer = written("json", {"content": "", "tool_calls": [call("add", {"text": argument})] * 2})
    assert told(parsed(FORMS["json"], list(answer))) == [("add", {"text": argument})] * 2


def test_markup_of_reasoning_behind_content_is_content() -> None:
    answer = "A <think>tag</think> opens thoughts."
    assert parsed(FORMS["json"], list(answer)) == Parts(answer)


def test_without_tools_only_reasoning_is_told_apart() -> None:
    free = Requested()
    answer = written("json", {"content": "Hi", "reasoning_content": "So", "tool_calls": [call("now", {})]})
    found = parsed(FORMS["json"], [answer], free)
    assert (found.reasoning, found.calls) == ("So", ())
    assert found.content == 'Hi\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    opened = AnswerForm(("<think>", "</think>"), is_reasoning=True)
    assert parsed(opened, ["So\n</think>\n\nHi"], free) == Parts("Hi", "So")
    assert parsed(opened, ["So </thi"], free) == Parts("", "So </thi")


def test_with_one_call_at_most_the_text_behind_it_is_left_out() -> None:
    answer = written("json", {"content": "Hi", "tool_calls": [call("now", {}), call("add", {})]}) + "more"
    for pieces in ([answer], list(answer)):
        parser = AnswerParser(FORMS["json"], Requested(None, TOOLS_JSON, REQUESTED.names, is_single=True))
        found = [parser.push(piece) for piece in pieces] + [parser.push("", is_last=True)]
        assert parser.is_done
        assert [delta for parts in found for delta in parts.calls] == [CallDelta(0, "now", "{}")]
        assert "".join(parts.content for parts in found) == "Hi"


@pytest.mark.parametrize("is_open", [False, True])
def test_a_forced_call_may_follow_reasoning(is_open: bool) -> None:
    form = AnswerForm(("<think>", "</think>"), is_reasoning=is_open)
    named = replace(REQUESTED, form="arguments", called="add")
    answer = ("" if is_open else "<think>") + 'So.</think>\n{"number":1}'
    for pieces in ([answer], list(answer)):
        assert parsed(form, pieces, named) == Parts("", "So.", (CallDelta(0, "add", '{"number":1}'),))
    array = replace(REQUESTED, form="array")
    both = '[{"name":"now","arguments":{}},{"name":"add","arguments":{"number":1'
    expected = (CallDelta(0, "now", "{}"), CallDelta(1, "add", '{"number":1'))
    assert parsed(AnswerForm(form.reasoning), list(both), array) == Parts("", "", expected)


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("7", ["integer"], 7),
        ("7", ["string"], "7"),
        ("7", [], "7"),
        ("x", ["integer"], "x"),
        ("True", ["boolean"], True),
        ("null", ["string", "null"], None),
        ("[1]", ["object", "array"], [1]),
        ("1.5", ["integer", "number"], 1.5),
        ("\n a\n\n", ["string"], " a\n"),
    ],
)
def test_an_argument_that_is_written_as_text_has_the_type_of_its_schema(
    text: str, types: list[str], value: Any
) -> None:
    assert typed(text, types) == value


DEFINITIONS = {
    "count": {"type": "integer"},
    "maybe": {"anyOf": [{"$ref": "#/$defs/count"}, {"type": "null"}]},
    "one": {"oneOf": [{"$ref": "#/$defs/two"}, {"type": "boolean"}]},
    "two": {"allOf": [{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/count"}]},
}


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"$ref": "#/$defs/count"}, {"7": 7, "x": "x"}),
        ({"$ref": "#/$defs/maybe", "description": "d"}, {"7": 7, "null": None, "true": "true"}),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/maybe"}]}, {"7": 7, "null": None, "x": "x"}),
        ({"$ref": "#/$defs/one"}, {"7": 7, "true": True, "null": "null"}),
        ({"$ref": "#/$defs/two"}, {"7": 7, "true": True, "null": "null"}),
        ({"enum": [1, None]}, {"1": 1, "null": None}),
        ({"const": 1}, {"1": 1}),
        ({"enum": ["1"]}, {"1": "1"}),
        ({"$ref": "#/definitions/count"}, {"7": "7"}),
        ({"$ref": "#/$defs/none"}, {"7": "7"}),
        ({"$ref": 5, "anyOf": 5, "type": [5, {}]}, {"7": "7"}),
        (True, {"7": "7"}),
    ],
)
@pytest.mark.parametrize("name", ["fields", "pairs"])
def test_arguments_in_fields_have_the_types_behind_references(
    name: str, schema: Any, values: dict[str, Any]
) -> None:
    parameters = {"properties": {"n": schema}, "$defs": DEFINITIONS}
    tools = json.dumps([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    free = Requested(None, tools.encode(), frozenset(["f"]))
    for text, value in values.items():
        answer = written(name, {"content": "", "tool_calls": [call("f", {"n": text})]})
        assert told(parsed(FORMS[name], [answer], free)) == [("f", {"n": value})]


def references(shape: str, number: int) -> bytes:
    """Return a tool whose schemas refer to each other."""

    def refer(*targets: int) -> dict[str, Any]:
        return {"anyOf": [{"$ref": f"#/$defs/d{target % number}"} for target in targets]}

    definitions = {
        "chain": {f"d{each}": refer(each + 1) for each in range(number - 1)},
        "fan": {f"d{each}": refer(each + 1, each + 2) for each in range(number - 2)},
        "cycle": {f"d{each}": refer(each + 1) for each in range(number)},
    }[shape]
    last = {f"d{number - 2}": {"type": "integer"}, f"d{number - 1}": {"type": "null"}}
    properties = {f"p{each}": refer(each) for each in range(number)}
    parameters = {"properties": properties, "$defs": {**definitions, **({} if shape == "cycle" else last)}}
    return json.dumps([{"function": {"name": "f", "parameters": parameters}}]).encode()


@pytest.mark.parametrize("shape", ["chain", "fan", "cycle"])
def test_the_types_behind_references_cost_work_that_grows_with_the_schemas(shape: str) -> None:
    def lines(number: int) -> int:
        types = ArgumentTypes(references(shape, number))
        found = {"chain": {"integer"}, "fan": {"integer", "null"}, "cycle": set()}[shape]
        num_lines = lines_of(lambda: types.of("f"))
        assert types.of("f")["p0"] == found
        return num_lines

    assert 0 < lines(1000) < 2.2 * lines(500)


def test_a_value_that_is_nested_too_deep_to_be_written_is_no_call() -> None:
    for depth in range(970, 1010):
        value = "[" * depth + "]" * depth
        answer = (
            f"<tool_call>\n<function=add>\n<parameter=list>\n{value}\n</parameter>\n</function>\n</tool_call>"
        )
        found = parsed(FORMS["fields"], [answer])
        assert found.calls or value in found.content


@pytest.mark.parametrize("name", NAMES)
def test_a_long_piece_is_read_as_many_short_ones(name: str) -> None:
    message = {"content": "Hi ", "tool_calls": [call("add", {"text": "long " * 700})] * 1}
    answer = written(name, message)
    assert parsed(FORMS[name], [answer]) == parsed(FORMS[name], list(answer))


def test_a_head_that_is_too_long_is_content_whatever_tokens_without_text_stand_in_it() -> None:
    pieces = ["<tool_call>\n<function=", *[""] * 100, *["x"] * 2000, "</function>"]
    found = parsed(FORMS["fields"], pieces)
    assert (found.calls, found.content) == ((), "".join(pieces))
