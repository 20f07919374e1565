"""Grammars in llguidance's form of Lark, made of JSON schemas and tools. Compiles nothing and knows no tokenizer.

All JSON is compact: a model cannot fill its answer with white space, and tokens of keys and punctuation are forced.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from msgspec.json import encode

from server.errors import InvalidRequest

# Bound on all schemas of one request, and on its tools. llguidance compiles larger ones, but each step would have to
# carry them.
MAX_BYTES = 256 << 10
# serde_json, which llguidance reads schemas with, refuses deeper documents.
MAX_DEPTH = 100
# llguidance clamps the bounds of numbers to 64-bit integers, and then breaks the schema.
BOUND_KEYS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
MAX_BOUND = 2**63 - 1
# Calls in one answer with `tool_choice` "required".
MAX_CALLS = 32
# llguidance's options of a schema. Clients must not set them: they could make it ignore keywords.
OPTIONS_KEY = "x-guidance"
OPTIONS = {"whitespace_flexible": False}
CALL_BEGIN, CALL_MIDDLE, CALL_END = '{"name":', ',"arguments":', "}"


@dataclass(frozen=True)
class Grammar:
    """A grammar that one request's output must match.

    Args:
        text: in llguidance's form of Lark.
        param: the request's field that it comes from, for error messages.
    """

    text: str
    param: str

    @cached_property
    def key(self) -> str:
        """A name for the content."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A function that a model may call, and the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]


def any_object() -> Grammar:
    """Return the grammar of any JSON object."""
    return _checked(f"start: {_json({'type': 'object'})}\n", "response_format")


def matching_schema(schema: Mapping[str, Any]) -> Grammar:
    """Return the grammar of JSON that matches a schema.

    Raises:
        InvalidRequest: the schema is too large or too deep, or bounds a number beyond 64 bits.
    """
    check_schema(schema, "response_format")
    return _checked(f"start: {_json(schema)}\n", "response_format")


def arguments_of(tool: ToolSchema) -> Grammar:
    """Return the grammar of the arguments of one call of `tool`; raises as `matching_schema`."""
    check_schema(tool.parameters, "tools")
    return _checked(f"start: {_json(tool.parameters)}\n", "tools")


def calls_of(tools: Sequence[ToolSchema], may_repeat: bool) -> Grammar:
    """Return the grammar of a JSON array of calls, each ``{"name":...,"arguments":{...}}``.

    Args:
        may_repeat: the array may have several calls.

    Raises:
        InvalidRequest: a schema is too deep or bounds a number beyond 64 bits, or all together are too large.
    """
    for tool in tools:
        check_schema(tool.parameters, "tools")
    more = f' ("," call){{0,{MAX_CALLS - 1}}}' if may_repeat else ""
    names = [f"call_{number}" for number in range(len(tools))]
    rules = [
        # Each schema is a document of its own, so that its `$ref` finds its own definitions.
        f"{name}: {_text(CALL_BEGIN + json.dumps(tool.name) + CALL_MIDDLE)} {_json(tool.parameters)} {_text(CALL_END)}"
        for name, tool in zip(names, tools, strict=True)
    ]
    lines = [f'start: "[" call{more} "]"', f"call: {' | '.join(names)}", *rules]
    return _checked("\n".join(lines) + "\n", "tools")


def check_schema(document: object, param: str) -> None:
    """Refuse JSON that is too large, nested more than `MAX_DEPTH` deep, or that bounds a number beyond 64 bits.

    Raises:
        InvalidRequest: names `param`.
    """
    # Before it is walked, which takes far longer.
    encoded(document, param)
    level = [document]
    for _ in range(MAX_DEPTH):
        for value in level:
            _check_bounds(value, param)
        children = (child for value in level for child in _children(value))
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return
    raise _too_deep(param)


def encoded(document: object, param: str) -> bytes:
    """Return tools or a schema as JSON; InvalidRequest names `param` if there are more than `MAX_BYTES`."""
    try:
        text = encode(document)
    except RecursionError:
        raise _too_deep(param) from None
    _check_size(len(text), param)
    return text


def _too_deep(param: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: a schema is nested more than {MAX_DEPTH} deep: make it flatter", param)


def _check_bounds(value: object, param: str) -> None:
    if not isinstance(value, dict):
        return
    for key in BOUND_KEYS:
        bound = value.get(key)
        if isinstance(bound, int | float) and not -MAX_BOUND <= bound <= MAX_BOUND:
            raise InvalidRequest(
                f"{param}: {key} is out of the range of 64-bit integers: choose a smaller bound", param
            )


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _json(schema: Mapping[str, Any]) -> str:
    own = {key: value for key, value in schema.items() if key != OPTIONS_KEY}
    return f"%json {json.dumps({OPTIONS_KEY: OPTIONS, **own})}"


def _text(text: str) -> str:
    return json.dumps(text)


def _check_size(num_bytes: int, param: str) -> None:
    if num_bytes > MAX_BYTES:
        raise InvalidRequest(
            f"{param}: its schemas have {num_bytes} bytes, more than {MAX_BYTES}: make them shorter", param
        )


def _checked(text: str, param: str) -> Grammar:
    _check_size(len(text), param)
    return Grammar(text, param)
