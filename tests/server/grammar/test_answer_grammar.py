"""Grammars of answers that may begin with reasoning, or be calls in the form of a chat template."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

import jsonschema_rs
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from msgspec.structs import replace

from server.errors import InvalidRequest
from server.grammar.answer_grammar import in_form
from server.grammar.answer_parser import CallDelta, Parts
from server.grammar.grammar import (
    NO_PARAMETERS,
    FunctionName,
    Grammar,
    NamedTool,
    ToolChoice,
    matching_schema,
    requested,
)
from server.text.answer_form import AnswerForm, CallSyntax
from tests.helpers.tiny_models import make_tokenizer
from tests.server.helpers.answer_templates import SPECIAL, TEMPLATES, call, form_of, parsed, written
from tests.server.helpers.lines import lines_of

ANSWER = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "color": {"enum": ["red", "blue"], "type": "string"},
        "number": {"type": "integer"},
    },
    "required": ["text", "number"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
PARAMETERS_OF = {"add": PARAMETERS, "now": NO_PARAMETERS}
CALLABLE = sorted(TEMPLATES)
# The token that ends answers.
END = 257
TOKENIZER = make_tokenizer()
TOKENIZER.add_special_tokens(
    {"additional_special_tokens": sorted({token for tokens in SPECIAL.values() for token in tokens})}
)
SPECIAL_TOKENS = {token_id: token.content for token_id, token in TOKENIZER.added_tokens_decoder.items()}


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return from_tokenizer(TOKENIZER, len(TOKENIZER), [END])


def takes(vocabulary: LLTokenizer, grammar: Grammar | None, text: str) -> bool:
    """Return whether a text matches a grammar as a whole."""
    assert grammar is not None
    matcher = LLMatcher(vocabulary, grammar.text, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    return bool(matcher.consume_tokens(ids)) and matcher.is_accepting()


def takes_ids(vocabulary: LLTokenizer, grammar: Grammar | None, *parts: str | int) -> bool:
    """Return whether texts, in tokens of one character, and special tokens match a grammar as a whole."""
    assert grammar is not None
    matcher = LLMatcher(vocabulary, grammar.text, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = [
        id_
        for part in parts
        for id_ in (
            [part] if isinstance(part, int) else TOKENIZER.encode(list(part), is_split_into_words=True)
        )
    ]
    return bool(matcher.consume_tokens(ids)) and matcher.is_accepting()


def walked(
    vocabulary: LLTokenizer, grammar: Grammar | None, words: list[str], random: Random
) -> list[int] | None:
    """Return tokens that a grammar allows, many of them of words, up to its end; None if that does not come."""
    assert grammar is not None
    matcher, ids = LLMatcher(vocabulary, grammar.text, log_level=0), list[int]()
    while not matcher.is_stopped() and len(ids) < 2000:
        word = TOKENIZER.encode(random.choice(words), add_special_tokens=False)
        mask = matcher.compute_logit_bias()
        if not mask[word[0]]:
            word = [random.choice([token for token, allowed in enumerate(mask) if allowed])]
        for token in word:
            if token == END or not matcher.compute_logit_bias()[token]:
                break
            assert matcher.consume_token(token)
            ids.append(token)
        if matcher.is_accepting() and (word == [END] or random.random() < 0.3):
            return ids
    return ids if matcher.is_accepting() else None


def special_form(name: str) -> AnswerForm:
    return form_of(name).with_special(SPECIAL_TOKENS)


@pytest.mark.parametrize("name", ["json", "named"])
def test_a_model_may_think_before_an_answer_that_matches(name: str, vocabulary: LLTokenizer) -> None:
    form = special_form(name)
    assert form.reasoning is not None
    begin, end = form.reasoning
    grammar = in_form(requested(matching_schema(ANSWER)), form).grammar
    assert takes(vocabulary, grammar, '{"a":1}')
    assert takes(vocabulary, grammar, f'{begin}\nSo {{"a": \n{end}\n\n{{"a":1}}')
    for text in (f"{begin}So{end}", f"{begin}So", "So", f'{begin}So{end}{{"a":"x"}}', f'So{end}{{"a":1}}'):
        assert not takes(vocabulary, grammar, text)


def test_where_the_prompt_opens_the_reasoning_the_answer_follows_its_end(vocabulary: LLTokenizer) -> None:
    form = AnswerForm(("<think>", "</think>"), is_reasoning=True)
    choice = NamedTool("function", FunctionName("add"))
    for asked in (requested(None, TOOLS, choice), requested(None, TOOLS, "required")):
        grammar = in_form(asked, form).grammar
        arguments = '{"text":"x","number":1}'
        answer = arguments if asked.called else f'[{{"name":"add","arguments":{arguments}}}]'
        assert takes(vocabulary, grammar, f"So\n</think>\n\n{answer}")
        assert not takes(vocabulary, grammar, answer)


def test_reasoning_ends_at_its_marker_also_where_that_is_written_as_text(vocabulary: LLTokenizer) -> None:
    form = special_form("named")
    ids = {text: token_id for token_id, text in form.special.items()}
    begin, end = ids["[THINK]"], ids["[/THINK]"]
    choice = NamedTool("function", FunctionName("now"))
    for asked in (requested(matching_schema(ANSWER)), requested(None, TOOLS, choice)):
        grammar = in_form(asked, form).grammar
        answer = "{}" if asked.called else '{"a":1}'
        assert takes_ids(vocabulary, grammar, begin, "I say [/THINK ok", end, answer)
        assert takes_ids(vocabulary, grammar, begin, end, answer)
        assert not takes_ids(vocabulary, grammar, begin, "I say [/THINK] ok", end, answer)


def test_a_grammar_costs_little_where_a_tokenizer_has_thousands_of_special_tokens() -> None:
    form = special_form("fields")

    def lines(num_special: int, num_keys: int) -> int:
        special = {number: f"<|{number}|>" for number in range(num_special)}
        many = AnswerForm(form.reasoning, False, form.calls, {**special, 5000: "<tool_call>"}, "")
        properties = {f"key{number}": {"type": "string"} for number in range(num_keys)}
        parameters = {"type": "object", "properties": properties}
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        asked = requested(matching_schema(ANSWER), tools)
        grammar = in_form(asked, many).grammar
        assert grammar is not None
        assert "<[5000]>" in grammar.text
        re.purge()
        return lines_of(lambda: in_form(asked, many))

    # The special tokens are read once, not for each key.
    assert lines(4096, 400) < 1.5 * (lines(4096, 1) + lines(1, 400))


@pytest.mark.parametrize(
    "named",
    [
        {"enum": list(range(5000))},
        {"enum": [f"value {number}" for number in range(5000)]},
        {"anyOf": [{"$ref": "#/$defs/x"}] * 5000},
        {"type": "object", "properties": {f"key{number}": {} for number in range(5000)}},
    ],
)
def test_a_schema_that_many_fields_refer_to_is_refused_before_it_costs_much(named: dict[str, Any]) -> None:
    def lines(num_fields: int) -> int:
        properties = {f"a{number}": {"$ref": "#/$defs/x"} for number in range(num_fields)}
        parameters = {"properties": properties, "$defs": {"x": named}}
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        asked = requested(matching_schema(ANSWER), tools)

        def refuse() -> None:
            with pytest.raises(InvalidRequest):
                in_form(asked, form_of("fields"))

        return lines_of(refuse)

    few, many = lines(1500), lines(3000)
    # A grammar of all fields takes twice as many lines for twice as many.
    assert many < 1.5 * few


def test_the_special_tokens_of_a_markup_are_bounded() -> None:
    form = special_form("json")
    assert form.calls is not None
    markup = "".join(chr(number) for number in range(0x4E00, 0x4E00 + 900))
    asked = requested(matching_schema(ANSWER), TOOLS)

    def lines(num_starts: int) -> int:
        parts = ((start, size) for start in range(num_starts) for size in range(1, 42))
        special = {number: markup[start : start + size] for number, (start, size) in enumerate(parts)}
        huge = AnswerForm((markup, "</think>"), False, form.calls, special)
        re.purge()
        return lines_of(lambda: in_form(asked, huge))

    assert lines(800) < 1.1 * lines(400)


@pytest.mark.parametrize("name", [*CALLABLE, "none"])
def test_beside_tools_that_may_be_called_an_answer_matches_its_schema_or_calls_theirs(
    name: str, vocabulary: LLTokenizer
) -> None:
    form = AnswerForm() if name == "none" else special_form(name)
    asked = in_form(requested(matching_schema(ANSWER), TOOLS), form)
    good = {"text": "x y", "number": 3}

    def answer(function: str, arguments: dict[str, Any]) -> str:
        if name == "none":
            return json.dumps({"name": function, "arguments": arguments}, separators=(",", ":"))
        text = written(name, {"content": "", "tool_calls": [call(function, arguments)]})
        text = text.strip("\n" if name == "channels" else None)
        if name not in ("fields", "pairs", "joined"):
            text = text.replace(json.dumps(arguments), json.dumps(arguments, separators=(",", ":")))
        if name == "bare":
            text = text.replace(": ", ":").replace(", ", ",")
        return text.replace(', "id": "abcdefghi"', "")

    final = "<|channel|>final<|message|>" if name == "channels" else ""
    assert takes(vocabulary, asked.grammar, final + '{"a":1}')
    assert takes(vocabulary, asked.grammar, answer("add", good))
    assert takes(vocabulary, asked.grammar, answer("add", {"text": "", "color": "red", "number": 3}))
    assert takes(vocabulary, asked.grammar, answer("now", {}))
    for text in (
        final + "So",
        answer("other", {}),
        answer("add", {"text": "x"}),
        answer("add", {**good, "number": "x"}),
        answer("add", {"text": "", "color": "green", "number": 3}),
    ):
        assert not takes(vocabulary, asked.grammar, text)
    found = parsed(form, [answer("add", good)], asked)
    assert [(each.name, json.loads(each.arguments)) for each in found.calls] == [("add", good)]


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("name", [*CALLABLE, "none"])
def test_all_that_a_grammar_allows_is_read_as_it_was_asked_for(
    name: str, choice: ToolChoice, vocabulary: LLTokenizer
) -> None:
    form, random = AnswerForm() if name == "none" else special_form(name), Random(f"{name} {choice}")
    asked = in_form(requested(matching_schema(ANSWER), TOOLS, choice), form)
    markup = (*(form.reasoning or ()), *(form.calls.texts() if form.calls else ()))
    words = [*filter(None, markup), *'"}]{,1a', "red", "add", "analysis", "final", "commentary"]
    num_ended = 0
    for _ in range(30):
        ids = walked(vocabulary, asked.grammar, words, random)
        if ids is None:
            continue
        num_ended += 1
        pieces = [SPECIAL_TOKENS.get(each) or str(TOKENIZER.decode([each])) for each in ids]
        text = "".join(pieces)
        found = parsed(form, pieces if text.isascii() else [text], asked)
        if found.calls or choice == "required":
            assert (found.content.strip(), len(found.calls) > 0) == ("", True), text
            for each in found.calls:
                assert each.name is not None
                jsonschema_rs.validate(PARAMETERS_OF[each.name], json.loads(each.arguments))
        else:
            jsonschema_rs.validate(ANSWER, json.loads(found.content))
    assert num_ended > 10


@pytest.mark.parametrize("name", [*CALLABLE, "none"])
def test_markup_in_an_answer_that_matches_is_text(name: str) -> None:
    form = AnswerForm() if name == "none" else special_form(name)
    asked = in_form(requested(matching_schema({"type": "object"}), TOOLS), form)
    calls = written("json" if name == "none" else name, {"content": "", "tool_calls": [call("now", {})]})
    answer = json.dumps(
        {"a": f"<think>b</think>{calls}<|end|><|start|>assistant<|channel|>final<|message|>c"}
    )
    written_answer = answer if form.calls is None else written(name, {"content": answer})
    for pieces in ([written_answer], list(written_answer)):
        found = parsed(form, pieces, asked)
        assert (found.content.strip(), found.reasoning, found.calls) == (answer, "", ())


OPTIONAL_INTEGER = {"anyOf": [{"type": "integer"}, {"type": "null"}]}


@pytest.mark.parametrize("name", ["fields", "pairs"])
@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (OPTIONAL_INTEGER, {"3": 3, "null": None}, ["x", "1.5"]),
        ({"$ref": "#/$defs/count"}, {"3": 3}, ["x", "-1"]),
        ({"anyOf": [{"$ref": "#/$defs/count"}, {"type": "null"}]}, {"3": 3, "null": None}, ["-1"]),
        ({"const": 5}, {"5": 5}, ["6", "x"]),
        ({"enum": [1, True, None]}, {"1": 1, "true": True, "null": None}, ["2", "x"]),
        ({"$ref": "#/$defs/color"}, {"red": "red"}, ["green", '"red"', " red", ""]),
        ({"enum": ["null", "a"]}, {"null": "null"}, ["None"]),
        ({"enum": ["a", "ab", None]}, {"a": "a", "ab": "ab", "null": None}, ["abc", "b"]),
        ({"type": ["string", "null"]}, {"abc": "abc", "null": None, '"a"': '"a"', "": ""}, []),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, {"a b": "a b", "3": 3}, []),
        ({"type": "string", "maxLength": 3}, {"abc": "abc", "</p": "</p", "": ""}, ["abcd"]),
        ({"type": "string", "pattern": "^a+$"}, {"aa": "aa"}, ["", "ab", "ba"]),
        ({"type": "string", "pattern": r"\d|x/", "minLength": 2}, {"a1": "a1", "x/": "x/"}, ["1", "ab"]),
        ({"anyOf": [{"type": "string", "maxLength": 1}, {"type": "null"}]}, {"n": "n", "null": None}, ["nn"]),
        ({"description": "any"}, {"x": "x"}, []),
        ({"enum": ["a", "\nb", "c</parameter></arg_value>"]}, {"a": "a"}, ["b", "\nb", "c"]),
    ],
)
def test_fields_match_their_schemas_and_are_read_as_they_are_held_to(
    name: str, schema: dict[str, Any], good: dict[str, Any], bad: list[str], vocabulary: LLTokenizer
) -> None:
    parameters = {
        "type": "object",
        "properties": {"n": schema},
        "required": ["n"],
        "$defs": {
            "count": {"type": "integer", "minimum": 0},
            "color": {"enum": ["red", "blue"], "type": "string"},
        },
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    form = form_of(name)
    asked = in_form(requested(matching_schema(ANSWER), tools), form)

    def answer(text: str) -> str:
        return written(name, {"content": "", "tool_calls": [call("f", {"n": text})]}).strip()

    for text, value in good.items():
        assert takes(vocabulary, asked.grammar, answer(text)), text
        (found,) = parsed(form, [answer(text)], asked).calls
        assert json.loads(found.arguments) == {"n": value}
    for text in bad:
        assert not takes(vocabulary, asked.grammar, answer(text)), text


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}]},
        {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 5}]},
        {"enum": ["1", 1]},
        {"type": "string", "not": {"const": "a"}},
        {"type": "string", "pattern": "a(?!b)"},
        {"type": "string", "pattern": "^a|b$"},
        {"type": "string", "pattern": r"\bword"},
        {"type": "string", "maxLength": "3"},
        {"enum": []},
        {"type": 5},
        {"$ref": "#/$defs/none"},
        {"$ref": "#/$defs/endless"},
        {"items": {"type": "string"}},
    ],
)
def test_strings_in_fields_that_cannot_be_held_to_their_schema_are_refused_by_key(
    schema: dict[str, Any],
) -> None:
    parameters = {
        "properties": {"n": schema},
        "$defs": {"endless": {"anyOf": [{"$ref": "#/$defs/endless"}] * 2}},
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    with pytest.raises(InvalidRequest, match="n of f may be a string") as refused:
        in_form(requested(matching_schema(ANSWER), tools), form_of("fields"))
    assert refused.value.param == "response_format"


@pytest.mark.parametrize("name", ["bare", "none"])
def test_an_answer_in_json_may_have_the_keys_of_a_call(name: str, vocabulary: LLTokenizer) -> None:
    form = AnswerForm() if name == "none" else special_form(name)
    properties = {
        "name": {"type": "string"},
        "arguments": {"type": "integer"},
        "parameters": {"type": "integer"},
    }
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    asked = in_form(requested(matching_schema(schema), TOOLS), form)
    key = "arguments" if name == "none" else "parameters"
    for text in (
        f'{{"name":"now","{key}":{{}}}}',
        f'{{"name":"now","{key}":1}}',
        '{"name":"x"}',
        '{"arguments":1}',
    ):
        assert takes(vocabulary, asked.grammar, text)
    assert not takes(vocabulary, asked.grammar, f'{{"name":"x","{key}":{{}}}}')


@pytest.mark.parametrize("is_parallel", [None, False])
@pytest.mark.parametrize("name", ["json", "section", "named section"])
def test_there_may_be_several_calls_unless_the_request_wants_one(
    name: str, is_parallel: bool | None, vocabulary: LLTokenizer
) -> None:
    form = special_form(name)
    asked = in_form(requested(matching_schema(ANSWER), TOOLS, "auto", is_parallel), form)
    one, both = (
        written(name, {"content": "", "tool_calls": [call("now", {})] * number}).strip() for number in (1, 2)
    )
    assert takes(vocabulary, asked.grammar, one)
    assert takes(vocabulary, asked.grammar, both) == (is_parallel is None)


THOUGHT = "<|channel|>analysis<|message|>So {\n<|end|><|start|>assistant"
FINAL = '<|channel|>final<|message|>{"a":1}'
CALL_OF_NOW = [
    f"{header}{kind}<|message|>{{}}"
    for header in ("<|channel|>commentary to=functions.now", " to=functions.now<|channel|>commentary")
    for kind in ("", " json", " <|constrain|>json", "<|constrain|>json")
]


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_harmonys_answers_match_in_the_final_message_behind_any_thoughts(
    tools: list[dict[str, Any]] | None, vocabulary: LLTokenizer
) -> None:
    form = special_form("channels")
    asked = in_form(requested(matching_schema(ANSWER), tools), form)
    for before in ("", THOUGHT, THOUGHT * 2):
        assert takes(vocabulary, asked.grammar, before + FINAL)
        for text in ('{"a":1}', FINAL.replace("1", "x"), FINAL.replace("final", "analysis"), THOUGHT[:-9]):
            assert not takes(vocabulary, asked.grammar, before + text)
        for text in CALL_OF_NOW:
            assert takes(vocabulary, asked.grammar, before + text) == (tools is not None)
    found = parsed(form, list(THOUGHT + FINAL), asked)
    assert found == Parts('{"a":1}', "So {")
    if tools is not None:
        found = parsed(form, list(THOUGHT + CALL_OF_NOW[0]), asked)
        assert found == Parts("", "So {", (CallDelta(0, "now", "{}"),))


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("choice", ["required", NamedTool("function", FunctionName("now"))])
def test_harmonys_forced_call_is_a_message_of_its_own_behind_any_thoughts(
    choice: ToolChoice, is_open: bool, vocabulary: LLTokenizer
) -> None:
    form = replace(special_form("channels"), is_reasoning=is_open)
    asked = in_form(requested(None, TOOLS, choice), form)
    opened = "So {\n<|end|><|start|>assistant" if is_open else ""
    for before in (opened, opened + THOUGHT):
        for text in CALL_OF_NOW:
            assert takes(vocabulary, asked.grammar, before + text)
        for text in (FINAL, "{}", '[{"name":"now","arguments":{}}]', CALL_OF_NOW[0].replace("now", "other")):
            assert not takes(vocabulary, asked.grammar, before + text)
        arguments = '{"text":"x","number":1}'
        other = f"<|channel|>commentary to=functions.add<|message|>{arguments}"
        assert takes(vocabulary, asked.grammar, before + other) == (choice == "required")
        answer = before + (other if choice == "required" else CALL_OF_NOW[0])
        whole = parsed(form, [answer], asked)
        assert [(each.name, each.arguments) for each in whole.calls] == [
            ("add", arguments) if choice == "required" else ("now", "{}")
        ]
        thoughts = ["So {"] * before.count("So {")
        assert (whole.content, whole.reasoning) == ("", "\n\n".join(thoughts))
        for cut in range(len(answer)):
            in_one = parsed(form, [answer[:cut]], asked)
            assert parsed(form, list(answer[:cut]), asked) == in_one
            assert not in_one.calls or whole.calls[0].arguments.startswith(in_one.calls[0].arguments)


def test_thoughts_of_harmony_end_where_the_parser_ends_them(vocabulary: LLTokenizer) -> None:
    form = special_form("channels")
    grammar = in_form(requested(matching_schema(ANSWER)), form).grammar
    ids = {text: token_id for token_id, text in form.special.items()}
    begin = (ids["<|channel|>"], "analysis", ids["<|message|>"])
    end = (
        ids["<|end|>"],
        ids["<|start|>"],
        "assistant",
        ids["<|channel|>"],
        "final",
        ids["<|message|>"],
        '{"a":1}',
    )
    assert takes_ids(vocabulary, grammar, *begin, "I say <|mess", *end)
    for marker in ("<|end|>", "<|start|>", "<|call|>", "<|return|>"):
        assert not takes_ids(vocabulary, grammar, *begin, f"I say {marker}", *end)
        assert not takes_ids(vocabulary, grammar, *begin, ids[marker], *end)


def test_harmonys_markup_may_be_plain_text(vocabulary: LLTokenizer) -> None:
    grammar = in_form(requested(matching_schema(ANSWER), TOOLS), form_of("channels")).grammar
    assert takes_ids(vocabulary, grammar, THOUGHT + FINAL)
    assert takes_ids(vocabulary, grammar, THOUGHT + CALL_OF_NOW[-1])
    assert not takes_ids(vocabulary, grammar, THOUGHT.replace("So", "<|start|>") + FINAL)


def test_inside_a_message_that_the_prompt_has_begun_only_its_text_comes(vocabulary: LLTokenizer) -> None:
    form = replace(special_form("channels"), is_content=True)
    asked = in_form(requested(matching_schema(ANSWER), TOOLS), form)
    assert takes(vocabulary, asked.grammar, '{"a":1}')
    assert parsed(form, ['{"a":1}'], asked) == Parts('{"a":1}')
    forced = in_form(requested(None, TOOLS, "required"), form)
    answer = '[{"name":"now","arguments":{}}]'
    assert takes(vocabulary, forced.grammar, answer)
    assert parsed(form, [answer], forced).calls == (CallDelta(0, "now", "{}"),)


def test_a_template_whose_calls_have_no_grammar_is_refused_by_the_formats_name() -> None:
    asked = requested(matching_schema(ANSWER), TOOLS)
    name_last = AnswerForm(calls=CallSyntax("json", "<call>", '<call>{"arguments": {}, "name": "', "", '"}'))
    with pytest.raises(InvalidRequest, match="chat template") as refused:
        in_form(asked, name_last)
    assert refused.value.param == "response_format"
    nested = {"type": "function", "function": {"name": "f", "parameters": {"anyOf": [PARAMETERS]}}}
    with pytest.raises(InvalidRequest, match="plain properties"):
        in_form(requested(matching_schema(ANSWER), [nested]), form_of("fields"))


@pytest.mark.parametrize(
    ("parameters", "key"),
    [
        ({"properties": None}, "properties"),
        ({"properties": [1]}, "properties"),
        ({"properties": {"a": None}}, "properties.a"),
        ({"properties": {"a": {"enum": 5}}}, "properties.a.enum"),
        ({"required": None}, "required"),
        ({"required": 5}, "required"),
        ({"required": [[]]}, "required"),
        ({"$defs": 5}, r"\$defs"),
    ],
)
def test_parameters_that_are_no_schema_are_refused_by_tool_and_key(
    parameters: dict[str, Any], key: str
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    with pytest.raises(InvalidRequest, match=f"{key} in the parameters of f ") as refused:
        in_form(requested(matching_schema(ANSWER), tools), form_of("fields"))
    assert refused.value.param == "tools"
    with pytest.raises(InvalidRequest, match=f"{key} in the parameters of f "):
        requested(None, tools, "required")


@pytest.mark.parametrize(
    "parameters", [{}, {"properties": {"a": {"type": "integer"}}}, {"type": ["object", "null"]}]
)
def test_forced_arguments_are_objects_whatever_the_schema_leaves_out(
    parameters: dict[str, Any], vocabulary: LLTokenizer
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    choice = NamedTool("function", FunctionName("f"))
    grammar = requested(None, tools, choice).grammar
    assert takes(vocabulary, grammar, "{}")
    for text in ("1", "null", "[]", '"x"'):
        assert not takes(vocabulary, grammar, text)


def test_annotations_constrain_only_strict_schemas(vocabulary: LLTokenizer) -> None:
    schema = {
        "title": "T",
        "type": "object",
        "examples": [{}],
        "propertyNames": {"type": "string"},
        "properties": {
            "format": {"type": "string", "format": "poem"},
            "title": {"type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/x"}},
        },
        "$defs": {"x": {"type": "string", "format": "date", "enum": ["title"]}},
        "required": ["format", "title"],
        "additionalProperties": False,
    }
    assert takes(vocabulary, matching_schema(schema), '{"format":"x","title":["title","title"]}')
    strict = LLMatcher(vocabulary, matching_schema(schema, is_strict=True).text, log_level=0)
    assert strict.is_error()
    for key, value in (("contains", {"type": "string"}), ("propertyNames", {"pattern": "^a"})):
        refused = LLMatcher(vocabulary, matching_schema({**schema, key: value}).text, log_level=0)
        assert key in refused.get_error()
