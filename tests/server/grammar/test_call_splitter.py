"""Tool calls that a grammar holds to their compact form, split as they come."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.grammar.answer_parser import CallDelta, CallSplitter, ToolCall, joined

CALLS: list[dict[str, Any]] = [
    {"name": "get_weather", "arguments": {"city": 'the "big" }]{[ one \\', "days": [1, {"a": None}]}},
    {"name": "no-arguments", "arguments": {}},
    {"name": "scalar", "arguments": "}"},
]


def compact(document: Any) -> str:
    return json.dumps(document, separators=(",", ":"))


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_calls_are_the_same_however_their_text_is_cut(size: int) -> None:
    text, splitter = compact(CALLS), CallSplitter(None)
    deltas = [
        delta for start in range(0, len(text), size) for delta in splitter.push(text[start : start + size])
    ]
    for index, call in enumerate(CALLS):
        own = [delta for delta in deltas if delta.index == index]
        assert [delta.name for delta in own if delta.name is not None] == [call["name"]]
        assert own[0].name is not None
        assert json.loads("".join(delta.arguments for delta in own)) == call["arguments"]
    assert {delta.index for delta in deltas} == {0, 1, 2}


def test_the_arguments_of_the_only_function_are_all_of_the_text() -> None:
    splitter = CallSplitter("f")
    assert splitter.push('{"a"') == [CallDelta(0, "f", '{"a"')]
    assert splitter.push("") == []
    assert splitter.push(":1}") == [CallDelta(0, None, ":1}")]


def test_calls_that_were_cut_off_have_the_arguments_so_far() -> None:
    def split(text: str, called: str | None) -> tuple[ToolCall, ...]:
        return joined(CallSplitter(called).push(text))

    assert split('[{"name":"f","arguments":{"a":[1,', None) == (ToolCall("f", '{"a":[1,'),)
    assert split('[{"name":"f","arg', None) == ()
    assert split('{"a":', "f") == (ToolCall("f", '{"a":'),)
