"""Answers in forms that clients of vLLM ask for: schemas, choices, regular expressions and grammars."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema_rs
import msgspec
import pytest

from server.api.json_io import parse
from server.api.schemas import ChatBody, CompletionBody, TokenizeBody
from server.errors import InvalidRequest
from server.grammar import grammar
from tests.server.helpers.live_server import LiveServer, error_of

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}
LARK = 'start: pair ("," pair){1,2}\npair: /[a-c]{2}/ "=" NUMBER\nNUMBER: /[0-9]{1,3}/\n'


def ask(server: LiveServer, **fields: Any) -> dict[str, Any]:
    body = {"model": "plain", "prompt": "hello", "max_tokens": 200, "temperature": 1.5, "seed": 3, **fields}
    reply = server.client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    return choice


def both(name: str, value: Any) -> list[dict[str, Any]]:
    """Return the fields of a form in the words of newer and of older clients."""
    return [{"structured_outputs": {name: value}}, {f"guided_{name}": value}]


@pytest.mark.parametrize("fields", both("json", SCHEMA) + both("json", json.dumps(SCHEMA)))
def test_a_schema_is_matched(server: LiveServer, fields: dict[str, Any]) -> None:
    jsonschema_rs.validate(SCHEMA, json.loads(ask(server, **fields)["text"]))


@pytest.mark.parametrize("fields", both("choice", ["yes", "no", 'it\'s "ü"\n\\ 😀']))
@pytest.mark.parametrize("seed", range(6))
def test_one_of_the_choices_is_taken(server: LiveServer, fields: dict[str, Any], seed: int) -> None:
    assert ask(server, **fields, seed=seed)["text"] in ("yes", "no", 'it\'s "ü"\n\\ 😀')


@pytest.mark.parametrize(
    "regex",
    [
        r"[a-f]{3}/[0-9]+\.com",
        r"a\/b(c|d)",
        "one\ntwo",
        r"\d{2}\n\d",
        r"(yes|no) \\ [/]",
        r"^[0-9]{3}$",
        r"^(a|b)\$$",
    ],
)
def test_an_expression_matches_the_whole_answer(server: LiveServer, regex: str) -> None:
    for fields in both("regex", regex):
        assert re.fullmatch(regex, ask(server, **fields)["text"])


def test_a_grammar_is_matched(server: LiveServer) -> None:
    for fields in both("grammar", LARK):
        assert re.fullmatch(r"[a-c]{2}=[0-9]{1,3}(,[a-c]{2}=[0-9]{1,3}){1,2}", ask(server, **fields)["text"])


# The options of vLLM's `StructuredOutputsParams`, as a client that writes out all of its fields sends them.
VLLMS_DEFAULTS: dict[str, Any] = {
    "disable_fallback": False,
    "disable_any_whitespace": False,
    "disable_additional_properties": False,
    "whitespace_pattern": None,
    "structural_tag": None,
}


def test_any_object_can_be_asked_for_in_four_ways(server: LiveServer) -> None:
    forms: list[dict[str, Any]] = [
        {"structured_outputs": {"json_object": True, "regex": None, **VLLMS_DEFAULTS}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "any"}}},
    ]
    for fields in forms:
        assert isinstance(json.loads(ask(server, **fields, max_tokens=3000)["text"]), dict)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "[1]"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs"),
        ({"structured_outputs": {"disable_additional_properties": True}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"guided_json": SCHEMA, "response_format": {"type": "json_object"}}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": "(?=a)b"}, "guided_regex"),
        ({"guided_regex": "a" * (300 << 10)}, "guided_regex"),
        ({"guided_choice": ["a"] * 1025}, "guided_choice"),
        ({"guided_grammar": "start: ~"}, "guided_grammar"),
        ({"guided_grammar": '%llguidance {"test_trace": true}\nstart: "a"'}, "guided_grammar"),
        ({"guided_grammar": "start: @other"}, "guided_grammar"),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format"),
    ],
)
def test_a_form_that_cannot_be_had_is_refused_by_its_field(
    server: LiveServer, fields: dict[str, Any], param: str
) -> None:
    reply = server.client.post("/v1/completions", json={"model": "plain", "prompt": "hello", **fields})
    assert reply.status_code == 400, reply.text
    assert error_of(reply)["param"] == param


def test_forms_that_ask_for_nothing_leave_an_answer_free(server: LiveServer) -> None:
    body = {"model": "plain", "prompt": "hello", "max_tokens": 4, "temperature": 0}
    free = server.client.post("/v1/completions", json=body).json()["choices"]
    forms: list[dict[str, Any]] = [
        {"structured_outputs": {}},
        {"guided_json": None},
        {"structured_outputs": {"json_object": False}},
        {"structured_outputs": VLLMS_DEFAULTS},
    ]
    for fields in forms:
        assert server.client.post("/v1/completions", json={**body, **fields}).json()["choices"] == free


LARGE = 300_000
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"title": "a" * LARGE}}}
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        *((CompletionBody, fields) for fields in both("json", {"title": "a" * LARGE})),
        *((CompletionBody, fields) for fields in both("regex", "a" * LARGE)),
        (ChatBody, {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"}),
        (TokenizeBody, {"messages": MESSAGES, "tools": [TOOL]}),
    ],
)
def test_forms_of_large_bodies_are_made_where_these_are_parsed(
    kind: type[msgspec.Struct], fields: dict[str, Any]
) -> None:
    """Beside the event loop: schemas of 256 KiB take 0.1 s, also if they are refused then."""
    body = {"model": "plain", **({"prompt": "hello"} if kind is CompletionBody else {}), **fields}
    with pytest.raises(InvalidRequest, match="make them shorter"):
        parse(kind, bytearray(json.dumps(body).encode()))


@pytest.mark.parametrize("fields", both("json", '{"a":[' + "[]," * LARGE + "[]]}"))
def test_the_values_of_a_long_text_are_not_made(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound on a body's values does not count those of its texts: 8 MiB of them were 2.5 million lists."""
    monkeypatch.setattr(grammar, "decode", pytest.fail)
    body = {"model": "plain", "prompt": "hello", **fields}
    with pytest.raises(InvalidRequest, match="make them shorter"):
        parse(CompletionBody, bytearray(json.dumps(body).encode()))
