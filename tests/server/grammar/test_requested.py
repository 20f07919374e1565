"""OpenAI's fields for structured output and tools, and what they ask for."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from server.errors import InvalidRequest
from server.grammar.grammar import (
    GivenTools,
    Requested,
    ResponseFormat,
    ToolChoice,
    any_object,
    matching_schema,
    requested,
)

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


class Fields(msgspec.Struct):
    """The fields as bodies have them."""

    response_format: ResponseFormat | None = None
    tools: GivenTools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None


def ask(**fields: Any) -> Requested:
    given = msgspec.json.decode(json.dumps(fields), type=Fields)
    grammar = None if given.response_format is None else given.response_format.grammar()
    return requested(grammar, given.tools, given.tool_choice, given.parallel_tool_calls)


def tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def test_without_fields_an_output_is_free() -> None:
    assert ask() == ask(response_format={"type": "text"}, tools=[], tool_choice="auto") == Requested()


def test_formats_are_grammars() -> None:
    assert ask(response_format={"type": "json_object"}).grammar == any_object()
    named = {"name": "answer", "schema": SCHEMA, "strict": True}
    assert ask(response_format={"type": "json_schema", "json_schema": named}).grammar == matching_schema(
        SCHEMA
    )


def test_tools_that_may_be_called_leave_the_output_free() -> None:
    free = ask(tools=[tool(description="d", parameters=SCHEMA)])
    assert (free.grammar, free.form) == (None, "free")
    assert json.loads(free.tools) == [tool(description="d", parameters=SCHEMA)]
    assert free.names == {"f"}
    assert not free.is_single
    assert ask(tools=[tool()], parallel_tool_calls=False).is_single


def test_tools_that_may_be_called_stand_beside_a_format() -> None:
    both = ask(tools=[tool()], response_format={"type": "json_object"})
    assert both.grammar == any_object()
    assert both.form == "free"
    assert both.names == {"f"}


def test_tools_that_must_not_be_called_are_not_shown() -> None:
    assert ask(tools=[tool()], tool_choice="none") == Requested()


def test_a_call_that_is_required_is_a_grammar_of_all_tools() -> None:
    both = ask(tools=[tool("f"), tool("g", parameters=SCHEMA)], tool_choice="required")
    assert both.form == "array"
    assert both.grammar is not None
    assert '{\\"name\\":\\"f\\"' in both.grammar.text
    assert '{\\"name\\":\\"g\\"' in both.grammar.text
    single = ask(tools=[tool()], tool_choice="required", parallel_tool_calls=False)
    assert single.grammar is not None
    assert '("," call)' in both.grammar.text
    assert '("," call)' not in single.grammar.text


def test_a_named_tool_is_a_grammar_of_its_arguments() -> None:
    choice = {"type": "function", "function": {"name": "g"}}
    named = ask(tools=[tool("f"), tool("g", parameters=SCHEMA)], tool_choice=choice)
    assert (named.form, named.called) == ("arguments", "g")
    assert named.grammar is not None
    assert named.grammar.text == matching_schema(SCHEMA).text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [tool(), tool()]}, "tools"),
        ({"tools": [tool(parameters={"type": "string"})], "tool_choice": "required"}, "tools"),
        ({"tools": [tool(parameters={"a": [[[]]] * 50_000})], "tool_choice": "required"}, "tools"),
    ],
)
def test_fields_that_contradict_each_other_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ask(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": "{}"}}},
        {"response_format": {"type": "grammar"}},
        {"tools": [{"type": "retrieval"}]},
        {"tools": [tool("a b")]},
        {"tools": [tool()] * 129},
        {"tool_choice": "always"},
    ],
)
def test_fields_of_another_shape_are_refused_when_they_are_parsed(fields: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        ask(**fields)


@pytest.mark.parametrize("key", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"])
@pytest.mark.parametrize("bound", [2**63, -(2**70), 1e300, 10**400])
def test_a_bound_beyond_64_bits_is_refused_by_name(key: str, bound: float) -> None:
    number = {"type": "integer", key: bound}
    nested = {"type": "object", "properties": {"a": {"type": "array", "items": number}}}
    with pytest.raises(InvalidRequest, match=f"{key} is out of the range") as refused:
        ask(tools=[tool(parameters=nested)], tool_choice="required")
    assert refused.value.param == "tools"
    with pytest.raises(InvalidRequest, match=f"{key} is out of the range") as refused:
        matching_schema(nested)
    assert refused.value.param == "response_format"


def test_bounds_within_64_bits_and_properties_with_their_names_are_taken() -> None:
    matching_schema({"type": "integer", "minimum": -(2**53), "maximum": 2**53})
    matching_schema({"type": "object", "properties": {"minimum": {"type": "integer"}}})
